// Which links there is something to do for, without a look at each of them.
//
//     over sockets               the kernel tells what has come and where there is room again; whoever posts notes the link
//     over memory, and over MPI  nobody tells: these few are walked at every look
//
// The kernel is asked to tell of input until it tells of some that nobody expects yet; then not before it is expected: an engine
// that sleeps must sleep, and one that computes must compute. It is asked to tell of room only when there was none.
// Thread: the engine's owner only; any may sleep on `fd`.
#ifndef BHVD_WATCH_H
#define BHVD_WATCH_H

#include "transport/link.h"

enum { WATCH_EVENTS = 64 };     // told of at a time

struct watch {
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
bhvd_status watch_init(struct watch *watch, struct link *links, int size, int rank);
void watch_close(struct watch *watch);          // in a forked child
void watch_fini(struct watch *watch);

// To be called whenever a link was advanced. BHVD_ERR_SYSTEM, with errno: the kernel takes no more descriptors.
bhvd_status watch_update(struct watch *watch, struct link *link);
// One look, a system call: notes the links over sockets for which there is something to do. Returns how many of the others
// have lost their peer, and which.
int watch_look(struct watch *watch, struct link *gone[WATCH_EVENTS]);

#endif
