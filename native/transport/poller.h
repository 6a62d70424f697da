// Finds the links that have work without checking all of them.
//
//     over sockets               epoll reports input, and output space; a rank that posts a message marks the link active
//     over memory, and over MPI  no events: these few are checked at every poll
//
// A data channel is registered for input until a message arrives that nobody expects yet, and again once it is expected:
// otherwise an engine could neither sleep nor compute. It is registered for output only when a write did not fit.
// Thread: holder of engine_lock; any thread may sleep on `fd`.
#pragma once

#include "transport/link.h"

enum { POLLER_EVENTS = 64 };    // per call

struct poller {
    int fd;                     // readable if there are events; -1: no link has a descriptor
    struct link *links;         // by rank
    struct link **polled;       // links without events, over memory or MPI
    struct link **blocked;      // links with a data channel that is not registered for input
    int polled_count, blocked_count;
    int socket_count;           // links over sockets only,
    int liveness_count;         // links with a liveness socket
    struct link_queue active_links;     // links that have work now
};

// links[rank] is unused. On BHVD_ERR_SYSTEM, with errno, nothing is left behind.
bhvd_status poller_init(struct poller *poller, struct link *links, int size, int rank);
void poller_fini(struct poller *poller);

// Must be called after each link_advance. BHVD_ERR_SYSTEM, with errno: the kernel takes no more descriptors.
bhvd_status poller_update(struct poller *poller, struct link *link);
// One system call: marks the links over sockets that have work as active. Returns the number of links
// whose liveness socket reports the peer's end, and the links in gone.
int poller_check(struct poller *poller, struct link *gone[POLLER_EVENTS]);
