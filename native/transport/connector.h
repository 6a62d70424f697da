// Connects to other ranks without waiting: who has one waits, for what it names and whatever else. Several channels at a time. An
// attempt that fails is repeated for as long as that may help. One thread.
#pragma once

#include <poll.h>
#include <stdbool.h>

#include "transport/auth.h"
#include "transport/link.h"
#include "transport/socket.h"

enum {
    CONNECTOR_POLLS_MAX = 64,           // channels that are connected at a time; others wait for their turn
    CONNECTOR_RETRY_MS = 50
};

// CHANNEL_STREAM + i is stream i. Of a link the control channel comes first, then all streams at once.
enum channel_kind { CHANNEL_CONTROL = 0, CHANNEL_LOCAL = 1, CHANNEL_STREAM = 2 };

// The first bytes on an authenticated connection; a byte is the answer.
struct hello {
    uint32_t magic, channel;
    uint32_t streams;                   // to this rank; on its control channel
};
enum { HELLO_MAGIC = 0x35484742 };      // "BGH5"

// Where a rank is reached, and how many streams it and this rank have asked for; 0: neither did.
struct address {
    char host[HOST_SIZE];
    int port, streams;
};

// A connection of a rank: one that has come in, or one that is to be made, and what has come of it.
struct arrival {
    struct arrival *next;
    int rank;                           // -1: nobody; nothing can be accepted, and error says why
    uint32_t channel;                   // CHANNEL_LOCAL: a UNIX connection, to be joined (connect_local.h)
    int fd;
    int stream_count;                   // of a control channel: agreed between the two
    int64_t round_trip_ns;              // of one, too
    struct bhvd_error error;            // of an attempt that has failed. BHVD_ERR_PEER_LOST: nobody is there any more;
                                        // BHVD_ERR_TIMEOUT: its host answers nothing
    // Of one that is to be made:
    bool is_at_start;                   // who refuses then has ended, and nobody else will tell
    int64_t connect_deadline_ns;        // until the other host answers;
    int64_t deadline_ns;                // until all is done
};

// NULL: no memory.
struct arrival *arrival_create(int rank, uint32_t channel);
// Closes the descriptor. arrival_destroy(NULL) is fine.
void arrival_destroy(struct arrival *arrival);

struct connector_options {
    int rank;                           // this one
    bool by_mpi;                        // streams are MPI's
    const struct address *addresses;    // by rank. These and the secret must outlive the connector
    const void *secret;
    size_t secret_size;
};

struct connector;

// NULL: no memory.
struct connector *connector_create(const struct connector_options *options);
// Gives up what it is about. connector_destroy(NULL) is fine.
void connector_destroy(struct connector *connector);
// In a forked child: its copies of the descriptors are closed.
void connector_after_fork(struct connector *connector);
// To be connected. The connector's from now on.
void connector_add(struct connector *connector, struct arrival *call);

// What is to be waited for: fills in at most CONNECTOR_POLLS_MAX entries, returns how many, and lowers *wake_ns to when it has something
// to do in any case.
int connector_poll(struct connector *connector, struct pollfd *polls, int64_t *wake_ns);
// After the wait, with these entries, until it is NULL: the next channel that is connected, or cannot be. The receiver's.
struct arrival *connector_next(struct connector *connector, const struct pollfd *polls);
