// Connections between ranks of one host: a UNIX socket for each pair, which passes the host's memory and the doorbells and
// then stays open to detect the peer's death. Used by connect.c only; struct connecting is the state that both share.
#pragma once

#include <string.h>

#include "transport/connections.h"
#include "transport/endpoint.h"

enum { LOCAL_JOIN_MS = 5000 };          // limit for the rest after the handshake

struct connecting {
    struct connections *c;
    const struct bhvd_context_options *options;
    bool *talks_to;                     // by rank: connected from the beginning
    int tcp_listen_fd, local_listen_fd;
    int memory_fd;
    int64_t deadline_ns;
    struct bhvd_error *error;
};

static inline bool connecting_share_memory(const struct connecting *k, int rank, int other)
{
    const struct endpoint *endpoints = k->c->endpoints;
    return endpoints[rank].host_id[0] && strcmp(endpoints[rank].host_id, endpoints[other].host_id) == 0;
}

static inline bool connecting_shares_memory(const struct connecting *k, int rank)
{
    return connecting_share_memory(k, k->c->rank, rank);
}

bhvd_status local_listen(struct connecting *k, const struct endpoint *mine);
// Connects to a rank of this host; the socket is not yet authenticated.
bhvd_status local_connect(struct connecting *k, int rank, int *fd);
// Both sides of an authenticated UNIX connection: they swap doorbells; the host's first rank adds the memory.
bhvd_status local_join(struct connecting *k, int rank, int fd, int64_t deadline_ns);
// Called on the host's first rank only: creates the memory.
bhvd_status local_make_memory(struct connecting *k);

// Gives the link to `peer`, with index `local_index` on this host, its rings and doorbell; doorbell_fd then belongs to the link.
void connections_use_rings(struct connections *c, int peer, int local_index, int doorbell_fd);
