// Which links there is something to do for, without a look at each of them.
//
//     over sockets               the kernel tells what has come and where there is room again; whoever posts notes the link
//     over memory, and over MPI  nobody tells: these few are walked at every look
//
// The kernel is asked to tell of input until it tells of some that nobody expects yet; then not before it is expected: an engine
// that sleeps must sleep, and one that computes must compute. It is asked to tell of room only when there was none.
// Thread: the engine's owner only; any may sleep on `fd`.
#pragma once

#include "transport/link.h"

enum { POLLER_EVENTS = 64 };    // told of at a time

struct poller {
    int fd;                     // readable when there is something to be told; -1: no link has a descriptor
    struct link *links;         // by rank
    struct link **walked;
    struct link **deaf;         // that have a stream of which the kernel does not tell
    int walked_count, deaf_count;
    int socket_count;           // links over sockets alone,
    int liveness_count;         // and with a liveness socket
    struct link_queue due;      // something is to be done for them now
};

// links[rank] is unused. BHVD_ERR_SYSTEM, with errno: nothing is left.
bhvd_status poller_init(struct poller *poller, struct link *links, int size, int rank);
void poller_close(struct poller *poller);       // in a forked child
void poller_fini(struct poller *poller);

// To be called whenever a link was advanced. BHVD_ERR_SYSTEM, with errno: the kernel takes no more descriptors.
bhvd_status poller_update(struct poller *poller, struct link *link);
// One look, a system call: notes the links over sockets for which there is something to do. Returns how many of the others
// have lost their peer, and which.
int poller_look(struct poller *poller, struct link *gone[POLLER_EVENTS]);
