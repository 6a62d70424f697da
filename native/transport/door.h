// A rank's door: its connections over TCP, made beside what the engine does.
//
//     a thread accepts, for as long as the rank is in the job: whoever proves the secret, and says a name that makes sense, is
//     an arrival
//     a thread for each link that is opened connects all that is missing of it, and is gone
//
// Of two ranks it is the higher that connects, so two that need each other at once do not meet in the door. Arrivals are in a
// list, and an eventfd tells of them. What an arrival is for is the taker's affair (connect.c), who is one thread.
#ifndef BHVD_DOOR_H
#define BHVD_DOOR_H

#include <stdbool.h>

#include "transport/link.h"

struct door;

// Where a rank is reached, and how many streams it and this rank have asked for; 0: neither did.
struct address {
    char host[16];                      // numeric IPv4
    int port, streams;
};

struct door_options {
    int rank, size;
    int tcp_listener, local_listener;   // the door's from now on; -1: none
    const void *secret;                 // copied
    size_t secret_size;
    const struct address *addresses;    // by rank; copied
    bool by_mpi;                        // streams are not the door's
    int bell_fd;                        // an eventfd that tells of arrivals
    // Beyond that a connection that is made later is not waited for: until the other host answers; until all is done.
    int connect_ms, open_ms;
};

struct arrival {
    struct arrival *next;
    int rank;                           // -1: nobody; nothing can be accepted, and error says why
    bool is_local;                      // `control` is a UNIX connection, to be joined (connect_local.h)
    int control, streams[LINK_STREAMS_MAX];     // descriptors, -1: not of this arrival
    int stream_count;                   // with control: agreed between the two
    int64_t round_trip_ns;
    struct bhvd_error error;            // of an attempt that has failed. BHVD_ERR_PEER_LOST: nobody is there any more;
                                        // BHVD_ERR_TIMEOUT: its host answers nothing
};

// BHVD_ERR_SYSTEM: the listeners are closed.
bhvd_status door_create(const struct door_options *options, struct door **out, struct bhvd_error *error);
// Nobody is let in any more, and attempts end by themselves. door_close(NULL) is fine. Idempotent.
void door_close(struct door *door);
void door_destroy(struct door *door);
// In a forked child: its copies of the listeners are closed.
void door_after_fork(struct door *door);

// Connects a control channel, and waits for that.
bhvd_status door_call(struct door *door, int rank, int64_t deadline_ns, struct arrival *out, struct bhvd_error *error);
// Of a UNIX connection to a rank of this host.
bhvd_status door_greet_local(struct door *door, int fd, int64_t deadline_ns, struct bhvd_error *error);
// Connects streams, and control if it is missing, and does not wait. stream_count: as agreed; unused when control is missing.
bhvd_status door_open(struct door *door, int rank, bool control_is_missing, int stream_count);

bool door_has_arrivals(const struct door *door);
// NULL: nobody is there. To be freed, with its descriptors used or closed.
struct arrival *door_take(struct door *door);
void arrival_close(struct arrival *arrival);

#endif
