// Connections between ranks of one host: a UNIX socket for each pair, which passes the host's memory and the doorbells and
// then stays to tell when the peer dies. Used by connect.c only, with what both know while they connect.
#pragma once

#include <string.h>

#include "transport/connections.h"
#include "transport/socket.h"

enum {
    CARD_MAGIC = 0x43484742,            // "BGHC", also tells the byte order
    HANDSHAKE_MS = 5000,                // what a rank that has proven itself may take for the rest
    ID_SIZE = 192
};

// To be raised by each change of what ranks say to each other.
enum { CARD_PROTOCOL = 4 };

// What a rank tells the others about itself. The first three are there in every version, so that versions can be compared.
struct card {
    uint32_t magic;
    uint32_t protocol;
    char version[24];                   // of the package
    int32_t rank, port;
    int32_t streams;                    // at most so many to each peer
    char host[HOST_SIZE];
    char host_id[ID_SIZE];              // empty: shares memory with nobody
    char local_name[40];                // of its UNIX socket
    char allreduce_path[16];            // must be the same everywhere
    int32_t uses_mpi;                   // too
    char negotiation[8];                // too
    int32_t negotiation_fanout;         // too
};

struct connecting {
    struct connections *c;
    const struct bhvd_context_options *options;
    struct card *cards;
    bool *talks_to;                     // by rank: from the beginning
    int tcp_listener, local_listener;
    int memory_fd;
    int64_t deadline_ns;
    struct bhvd_error *error;
};

static inline bool connecting_share_memory(const struct connecting *k, int rank, int other)
{
    const char *id = k->cards[rank].host_id;
    return id[0] && strcmp(id, k->cards[other].host_id) == 0;
}

static inline bool connecting_shares_memory(const struct connecting *k, int rank)
{
    return connecting_share_memory(k, k->c->rank, rank);
}

bhvd_status local_listen(struct connecting *k, const char *name);
// To a rank of this host; the socket is not yet authenticated.
bhvd_status local_connect(struct connecting *k, int rank, int *fd);
// Both sides of an authenticated UNIX connection: doorbells are swapped; the host's first rank adds the memory.
bhvd_status local_join(struct connecting *k, int rank, int fd, int64_t deadline_ns);
// The host's first rank makes the memory.
bhvd_status local_make_memory(struct connecting *k);

// Gives the link to `peer`, which is `local_index` of this host, its rings and doorbell; doorbell_fd becomes the link's.
void connections_use_rings(struct connections *c, int peer, int local_index, int doorbell_fd);
