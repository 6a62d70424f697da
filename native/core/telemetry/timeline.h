// The timeline: a Chrome trace of the coordinator's view, valid JSON after every event. Written by rank 0.
// One "process" per operation name. Engine only; all functions do nothing while no timeline is open.
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "core/message/request.h"

struct timeline {
    bool open, mark_cycles;
    int fd;
    char *path;
    int64_t start_ns, end;              // end: offset of the closing bracket
    struct log *log;                    // for the message when writing fails
    struct table tracks;             // by set and name
    int next_pid;
};

// Replaces an open timeline.
bhvd_status timeline_open(struct timeline *timeline, const char *path, bool mark_cycles, struct bhvd_error *error);
void timeline_close(struct timeline *timeline);

// Begins an event of the operation.
void timeline_begin(struct timeline *timeline, const struct operation_key *key, const char *prefix, const char *kind);
// The negotiation, from the first request for a name, begun with TIMELINE_NEGOTIATE, to its response; rank: is ready.
#define TIMELINE_NEGOTIATE "NEGOTIATE_"
void timeline_rank_ready(struct timeline *timeline, const struct operation_key *key, int rank);
void timeline_negotiation_end(struct timeline *timeline, const struct operation_key *key);
// The response was an error: nothing will run.
void timeline_refusal(struct timeline *timeline, const struct operation_key *key, const char *message);
// Ends the event of an operation that was begun without a prefix.
void timeline_operation_end(struct timeline *timeline, const struct operation_key *key, const struct bytes *request, bool failed);
// The coordinator responds.
void timeline_cycle(struct timeline *timeline);
