// The rendezvous: an allgather of one small blob per rank, before any rank knows another's address.
//
// Server side (bhvd_rendezvous_create, in rendezvous_server.c): a thread that accepts connections on one TCP port,
// authenticates each (auth.h), reads one request (scope, rank, size, blob) and holds the connection until all `size`
// ranks of that scope have arrived; then each gets all blobs and the scope is forgotten. Any number of scopes may be
// open at once, and a name may be reused afterwards. Connections are served concurrently: a slow, idle
// or hostile one delays nobody, is dropped after a few seconds without a complete authenticated request, and the number
// of unauthenticated ones is bounded. A disagreement (two sizes, a rank twice, rank >= size) and the first rank whose
// time expires end the scope: every rank that waits in it gets the error message. A rank whose connection breaks leaves its
// scope.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "bagua_hvd.h"

enum { RENDEZVOUS_BLOB_MAX = 4096, RENDEZVOUS_SCOPE_MAX = 255, RENDEZVOUS_SIZE_MAX = 16384 };

struct rendezvous_blob {
    uint32_t size;
    unsigned char data[RENDEZVOUS_BLOB_MAX];
};

struct rendezvous_address {
    const char *host;           // numeric
    int port;
    const void *secret;
    size_t secret_size;
};

// Sends `mine`, fills all[0..size-1] in rank order. Retries to connect until the server is up, at most until
// deadline_ns.
// BHVD_ERR_TIMEOUT names the ranks that did not arrive (at most eight, then "and N more"): the client tells the server
// its deadline, and the server responds by then. BHVD_ERR_AUTH: the secret is stale or wrong; names the variable to
// check (_HOROVOD_SECRET_KEY). BHVD_ERR_SYSTEM: nobody listens there, naming host and port.
// BHVD_ERR_MISMATCH: the server's message about a disagreement. BHVD_ERR_PEER_LOST: the server ended while this
// rank waited.
// BHVD_ERR_ARGUMENT: rank, size, scope or blob out of their bounds, or host not numeric.
bhvd_status rendezvous_exchange(const struct rendezvous_address *address, const char *scope, int rank, int size,
                                const struct rendezvous_blob *mine, struct rendezvous_blob *all, int64_t deadline_ns,
                                struct bhvd_error *error);
