// A rank's listener: its connections over TCP, made beside what the engine does. One thread accepts and connects, for as long as the rank
// is in the job: whoever proves the secret, and says a name that makes sense, is an arrival; and so is a channel that this rank has
// connected (connector.h).
//
// Of two ranks it is the higher that connects, so two that need each other at once do not meet in the listener. Arrivals are in a
// list, and an eventfd tells of them. What an arrival is for is the taker's affair (connect.c), who is one thread.
#pragma once

#include <stdbool.h>

#include "transport/connector.h"

struct listener;

struct listener_options {
    int rank, size;
    int tcp_listener, local_listener;   // the listener's from now on; -1: none
    int tcp_port;
    const void *secret;                 // copied
    size_t secret_size;
    const struct address *addresses;    // by rank; copied
    bool by_mpi;                        // streams are not the listener's
    int doorbell_fd;                    // an eventfd that tells of arrivals
    // Beyond that a connection that is made later is not waited for: until the other host answers; until all is done.
    int connect_ms, open_ms;
};

// BHVD_ERR_SYSTEM: the listeners are closed.
bhvd_status listener_create(const struct listener_options *options, struct listener **out, struct bhvd_error *error);
// Nobody is let in any more, and nothing is connected. listener_close(NULL) is fine. Idempotent.
void listener_close(struct listener *listener);
void listener_destroy(struct listener *listener);
// In a forked child: its copies of the listeners, and of connections that were being made, are closed.
void listener_after_fork(struct listener *listener);

// Connects a control channel, at the start of the job, and does not wait: an arrival tells how it ended.
bhvd_status listener_open_control(struct listener *listener, int rank, int64_t deadline_ns);
// The same later, of any channel.
bhvd_status listener_open(struct listener *listener, int rank, uint32_t channel);
// Proves itself over a UNIX connection to a rank of this host, and waits for that.
bhvd_status listener_handshake_local(struct listener *listener, int rank, int fd, int64_t deadline_ns, struct bhvd_error *error);

bool listener_has_arrivals(const struct listener *listener);
// NULL: nobody is there. The receiver's.
struct arrival *listener_take(struct listener *listener);
