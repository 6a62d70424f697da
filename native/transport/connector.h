// Connects to other ranks without blocking; the owner polls for it (connector_poll). Several channels at a time. Failed
// attempts are repeated for as long as that may help. One thread.
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

struct connector;

// For this rank. endpoints, proofs: by rank; must outlive the connector. NULL: no memory.
struct connector *connector_create(int rank, const struct endpoint *endpoints, const struct bhvd_proofs *proofs);
// Abandons its attempts. connector_destroy(NULL) is fine.
void connector_destroy(struct connector *connector);
// In a forked child: closes its copies of the descriptors.
void connector_after_fork(struct connector *connector);
// Starts connecting. The connector owns it from now on.
void connector_add(struct connector *connector, struct arrival *arrival);

// Fills in the descriptors to poll, at most CONNECTOR_POLLS_MAX, returns how many, and lowers *wake_ns to the connector's next
// timeout.
int connector_poll(struct connector *connector, struct pollfd *polls, int64_t *wake_ns);
// After the poll, with these entries, until it is NULL: the next channel that is connected or has failed. The caller owns it.
struct arrival *connector_next(struct connector *connector, const struct pollfd *polls);
