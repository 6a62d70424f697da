// The timeline: a Chrome trace of what the coordinator sees, valid JSON after every event. Rank 0 writes it.
// One "process" per operation name. Engine only; every call does nothing while no timeline is open.
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "base/table.h"
#include "core/message/request.h"

struct timeline {
    bool open, mark_cycles;
    int fd;
    char *path;
    int64_t start_ns, end;              // end: where the closing bracket begins
    struct log *log;                    // where it says that it ends
    struct table processes;             // by set and name
    int next_pid;
};

// In place of one that is open.
bhvd_status timeline_open(struct timeline *timeline, const char *path, bool mark_cycles, struct bhvd_error *error);
void timeline_close(struct timeline *timeline);

// Something about the operation begins.
void timeline_begin(struct timeline *timeline, const struct operation_key *key, const char *prefix, const char *kind);
// From the first request for a name, which begins with TIMELINE_NEGOTIATE, to its response; rank: is ready.
#define TIMELINE_NEGOTIATE "NEGOTIATE_"
void timeline_rank_ready(struct timeline *timeline, const struct operation_key *key, int rank);
void timeline_negotiation_end(struct timeline *timeline, const struct operation_key *key);
// The answer was an error: nothing will run.
void timeline_refusal(struct timeline *timeline, const struct operation_key *key, const char *message);
// An operation, which began without a prefix, has run.
void timeline_operation_end(struct timeline *timeline, const struct operation_key *key, const struct bytes *request, bool failed);
// The coordinator answers.
void timeline_cycle(struct timeline *timeline);
