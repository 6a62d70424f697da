// Connects to other ranks without blocking; the owner polls for it (connector_poll). Several channels at a time. Failed
// attempts are repeated for as long as that may help. Call it under the lock of the listener, which owns it.
#pragma once

#include <poll.h>
#include <stdbool.h>

#include "transport/auth.h"
#include "transport/link.h"

enum {
    CONNECTOR_POLLS_MAX = 64,           // channels that are connected at a time; others are queued
    CONNECTOR_RETRY_MS = 50
};

// A connection with a rank, accepted or to be made, and its result.
struct arrival {
    struct arrival *next;
    int rank;                           // -1: none; this rank can accept no connection, error says why
    uint32_t channel;                   // CHANNEL_LOCAL: a UNIX connection, still to be joined (connect_local.c)
    int fd;
    int data_channel_count;             // control channel: as agreed between the two
    int64_t round_trip_ns;              // control channel
    struct bhvd_error error;            // of a failed attempt. BHVD_ERR_PEER_LOST: the rank is gone;
                                        // BHVD_ERR_TIMEOUT: its host does not respond
    // Connections to be made:
    bool is_at_start;                   // a rank that refuses at this time has ended, and nobody else will report it
    int64_t connect_deadline_ns;        // until the other host responds;
    int64_t deadline_ns;                // until the connection is complete
};

// NULL: no memory.
struct arrival *arrival_create(int rank, uint32_t channel);
// Closes the descriptor. arrival_destroy(NULL) is fine.
void arrival_destroy(struct arrival *arrival);

// One connection attempt in progress.
struct attempt {
    struct arrival *arrival;            // NULL: no attempt
    enum attempt_stage { PAUSED, CONNECTING, HANDSHAKE } stage;
    int fd;                             // -1: PAUSED
    int poll;                           // the index of its entry; -1: none
    int64_t wake_ns;                    // PAUSED: until then; else the stage's limit
    int64_t failing_since_ns;           // 0: the last step succeeded
    size_t moved;                       // bytes of the callee's proof
    uint8_t proof[BHVD_PROOF_BYTES];
};

// Begins with this rank, all endpoints and proofs, by rank, which must outlive it, and zeros.
struct connector {
    int rank;
    const struct endpoint *endpoints;
    const struct bhvd_proofs *proofs;
    struct FIFO(struct arrival) wanted; // waiting to be attempted; the connector owns them from now on
    int unserved;                       // attempts that were polled and not yet handled
    struct attempt attempts[CONNECTOR_POLLS_MAX];
};

// Abandons its attempts, and what is wanted.
void connector_close(struct connector *connector);
// In a forked child: closes its copies of the descriptors.
void connector_after_fork(struct connector *connector);

// Fills in the descriptors to poll, at most CONNECTOR_POLLS_MAX, returns how many, and lowers *wake_ns to the connector's next
// timeout.
int connector_poll(struct connector *connector, struct pollfd *polls, int64_t *wake_ns);
// After the poll, with these entries, until it is NULL: the next channel that is connected or has failed. The caller owns it.
struct arrival *connector_next(struct connector *connector, const struct pollfd *polls);
