// A rank's door: its connections over TCP, made beside what the engine does. One thread accepts and connects, for as long as the rank is
// in the job: whoever proves the secret, and says a name that makes sense, is an arrival; and so is a link that this rank has
// connected (connector.h).
//
// Of two ranks it is the higher that connects, so two that need each other at once do not meet in the door. Arrivals are in a
// list, and an eventfd tells of them. What an arrival is for is the taker's affair (connect.c), who is one thread.
#ifndef BHVD_DOOR_H
#define BHVD_DOOR_H

#include <stdbool.h>

#include "transport/connector.h"

struct door;

struct door_options {
    int rank, size;
    int tcp_listener, local_listener;   // the door's from now on; -1: none
    int tcp_port;
    const void *secret;                 // copied
    size_t secret_size;
    const struct address *addresses;    // by rank; copied
    bool by_mpi;                        // streams are not the door's
    int bell_fd;                        // an eventfd that tells of arrivals
    // Beyond that a connection that is made later is not waited for: until the other host answers; until all is done.
    int connect_ms, open_ms;
};

// BHVD_ERR_SYSTEM: the listeners are closed.
bhvd_status door_create(const struct door_options *options, struct door **out, struct bhvd_error *error);
// Nobody is let in any more, and no link is connected. door_close(NULL) is fine. Idempotent.
void door_close(struct door *door);
void door_destroy(struct door *door);
// In a forked child: its copies of the listeners are closed.
void door_after_fork(struct door *door);

// Connects a control channel, at the start of the job, and does not wait: an arrival tells how it ended.
bhvd_status door_open_control(struct door *door, int rank, int64_t deadline_ns);
// Connects streams, and control if it is missing, and does not wait. stream_count: as agreed; unused when control is missing.
bhvd_status door_open(struct door *door, int rank, bool control_is_missing, int stream_count);
// Proves itself over a UNIX connection to a rank of this host, and waits for that.
bhvd_status door_greet_local(struct door *door, int rank, int fd, int64_t deadline_ns, struct bhvd_error *error);

bool door_has_arrivals(const struct door *door);
// NULL: nobody is there. The receiver's.
struct arrival *door_take(struct door *door);

#endif
