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

// The negotiation lasts from the first request for a name to its response.
enum timeline_event { TIMELINE_EXECUTION, TIMELINE_NEGOTIATION };
void timeline_begin(struct timeline *timeline, const struct operation_key *key, enum timeline_event event, const char *kind);
// A rank has requested the operation.
void timeline_rank_ready(struct timeline *timeline, const struct operation_key *key, int rank);
void timeline_negotiation_end(struct timeline *timeline, const struct operation_key *key);
// The response was an error: nothing will run.
void timeline_refusal(struct timeline *timeline, const struct operation_key *key, const char *message);
void timeline_operation_end(struct timeline *timeline, const struct operation_key *key, const struct bytes *request, bool failed);
// The coordinator responds.
void timeline_cycle(struct timeline *timeline);
