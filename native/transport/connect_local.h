// Connections between ranks of one host: a UNIX socket for each pair, which passes the host's memory and the doorbells and
// then stays open to detect the peer's death. Used by connect.c only; struct connecting is the state that both share.
#pragma once

#include <string.h>

#include "transport/connections.h"
#include "transport/socket.h"

enum {
    ENDPOINT_MAGIC = 0x43484742,        // "BGHC", also detects another byte order
    LOCAL_JOIN_MS = 5000,               // limit for the rest after the handshake
    ID_SIZE = 192
};

// Raise it with each change of the messages between ranks.
enum { ENDPOINT_PROTOCOL = 6 };

// A rank's description for the others. All versions have the first three fields, so that versions can be compared.
struct endpoint_info {
    uint32_t magic;
    uint32_t protocol;
    char version[24];                   // of the package
    int32_t rank, port;
    int32_t data_channels;              // at most this many to each peer
    char host[HOST_SIZE];
    char host_id[ID_SIZE];              // empty: shares no memory
    uint8_t nonce[32];                  // auth.h; also the name of its UNIX socket
    char allreduce_path[16];            // must be the same everywhere
    int32_t uses_mpi;                   // same
    char negotiation[8];                // same
    int32_t negotiation_fanout;         // same
};

struct connecting {
    struct connections *c;
    const struct bhvd_context_options *options;
    struct endpoint_info *endpoints;
    struct bhvd_proofs *proofs;         // by rank
    bool *talks_to;                     // by rank: connected from the beginning
    int tcp_listener, local_listener;
    int memory_fd;
    int64_t deadline_ns;
    struct bhvd_error *error;
};

static inline bool connecting_share_memory(const struct connecting *k, int rank, int other)
{
    const char *id = k->endpoints[rank].host_id;
    return id[0] && strcmp(id, k->endpoints[other].host_id) == 0;
}

static inline bool connecting_shares_memory(const struct connecting *k, int rank)
{
    return connecting_share_memory(k, k->c->rank, rank);
}

bhvd_status local_listen(struct connecting *k, const struct endpoint_info *mine);
// Connects to a rank of this host; the socket is not yet authenticated.
bhvd_status local_connect(struct connecting *k, int rank, int *fd);
// Both sides of an authenticated UNIX connection: they swap doorbells; the host's first rank adds the memory.
bhvd_status local_join(struct connecting *k, int rank, int fd, int64_t deadline_ns);
// Called on the host's first rank only: creates the memory.
bhvd_status local_make_memory(struct connecting *k);

// Gives the link to `peer`, with index `local_index` on this host, its rings and doorbell; doorbell_fd then belongs to the link.
void connections_use_rings(struct connections *c, int peer, int local_index, int doorbell_fd);
