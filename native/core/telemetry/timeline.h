// The timeline: a Chrome trace of what the coordinator sees, valid JSON after every event. Rank 0 writes it.
// One "process" per operation name. Engine only; every call does nothing while no timeline is open.
#ifndef BHVD_TIMELINE_H
#define BHVD_TIMELINE_H

#include <stdbool.h>
#include <stdint.h>

#include "base/table.h"
#include "core/context/operation.h"

struct timeline {
    bool open, mark_cycles;
    int fd;
    char *path;
    int64_t start_ns, end;              // end: where the closing bracket begins
    struct log *log;                    // where it says that it ends
    struct table processes;             // by set and name
    int next_pid;
};

void timeline_fini(struct timeline *timeline);

// From the first request for a name to its answer; rank: is ready.
void timeline_negotiation_begin(bhvd_context *ctx, const struct operation_key *key, const char *kind);
void timeline_rank_ready(bhvd_context *ctx, const struct operation_key *key, int rank);
void timeline_negotiation_end(bhvd_context *ctx, const struct operation_key *key);
// The answer was an error: nothing will run.
void timeline_refusal(bhvd_context *ctx, const struct operation_key *key, const char *message);
// An operation runs.
void timeline_operation_begin(bhvd_context *ctx, const struct bhvd_handle *operation);
void timeline_operation_end(bhvd_context *ctx, const struct bhvd_handle *operation, bool failed);
// The coordinator answers.
void timeline_cycle(bhvd_context *ctx);

#endif
