// A rank's listener: makes its TCP connections concurrently with the engine. One thread accepts and connects while the rank is in
// the job. Its results are arrivals: peers with a valid introduction (auth.h), and channels that this rank has connected
// (connector.h).
//
// The higher of two ranks connects, so simultaneous attempts never cross. Arrivals are queued
// and reported by an eventfd. One thread takes them and decides their use (connect.c).
#pragma once

#include <stdbool.h>

#include "transport/connector.h"

struct listener;

struct listener_options {
    int rank, size;
    int tcp_listen_fd, local_listen_fd;   // owned by the listener from now on; -1: none
    const struct endpoint *endpoints;   // by rank, as are the proofs; must outlive the listener
    const struct bhvd_proofs *proofs;
    int doorbell_fd;                    // an eventfd that reports arrivals
    // Limits for a later connection: until the other host responds; until the connection is complete.
    int connect_ms, open_ms;
};

// On BHVD_ERR_SYSTEM the two listening sockets are closed.
bhvd_status listener_create(const struct listener_options *options, struct listener **out, struct bhvd_error *error);
// Stops accepting and connecting. listener_close(NULL) is fine. Idempotent.
void listener_close(struct listener *listener);
void listener_destroy(struct listener *listener);
// In a forked child: closes its copies of the listening sockets, and of connections in progress.
void listener_after_fork(struct listener *listener);

// Starts connecting a channel; an arrival reports the result. start_deadline_ns: of the start of the job; 0: later.
bhvd_status listener_open(struct listener *listener, int rank, uint32_t channel, int64_t start_deadline_ns);
// Runs the connecting side of the handshake over a UNIX connection to a rank of this host. Blocks.
bhvd_status listener_handshake_local(struct listener *listener, int rank, int fd, int64_t deadline_ns, struct bhvd_error *error);

bool listener_has_arrivals(const struct listener *listener);
// NULL: no arrival. The caller owns it.
struct arrival *listener_take(struct listener *listener);
