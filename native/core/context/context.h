// The state of one rank, and which threads may access which part of it:
//
//     posting side    any thread, under `post_lock`: posted operations, names in progress, the reason for refusing more
//     engine          whoever holds `engine_lock` (api/progress.c): links, negotiation, cache, executions
//     process sets    written by the engine, read by any thread, under `sets_lock`; likewise the stalled ranks, with their own lock
#pragma once

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>

#include "base/clock.h"
#include "core/context/process_set.h"
#include "core/context/response_cache.h"
#include "core/message/frame.h"
#include "core/telemetry/log.h"
#include "core/telemetry/timeline.h"
#include "executor/task.h"

enum { STALL_CHECK_NS = 1000000000 };           // from one check of waiting operations to the next

// On rank 0: stalled ranks, as of the last check.
struct stalled {
    pthread_mutex_t lock;                       // only the engine writes
    struct bhvd_stalled *ranks;                 // by rank, those without operations are not stalled; NULL: none is
};

// Written by the engine, read by any thread at any time.
struct engine_counters {
    _Atomic uint64_t operations, executions, cache_hits, cache_misses, coordinator_ns, negotiation_messages;
};

// Agreed operations that this rank executes together, in the global order of the job.
struct execution {
    struct execution *next;
    uint64_t number;            // in the order of all responses of the job, from 1
    uint64_t after;             // it starts when those up to this number are over
    struct network_cost network;  // as measured by the coordinator: all ranks choose by the same values
    uint32_t process_set;       // looked up when it starts, since the set may be removed before
    struct bhvd_sent sent;      // bytes sent for it so far
    struct plan plan;           // of a concurrent execution
    int count;
    struct collective *colls[];  // of operations
};

struct bhvd_context {
    struct bhvd_context_options options;        // without strings
    int tree_fanout;                            // negotiation/relay.h
    struct executor exec;                       // the executor; after its failure nothing is executed

    pthread_mutex_t post_lock;
    struct FIFO(struct bhvd_operation) posted;
    _Atomic uint32_t posted_count;              // length of the list, which the engine reads without the lock
    struct table names;                         // operations in progress on this rank, by set and name
    struct bhvd_error closing;                  // the reason for refusing posts (context_accepts); BHVD_OK while usable
    struct bhvd_error first_loss;               // the error of the first operation that another rank ended
    _Atomic uint32_t outstanding;               // posted and not ended
    _Atomic bool leaving;                       // bhvd_context_shutdown was called

    pthread_mutex_t engine_lock;
    pthread_t progress_thread;
    bool progress_thread_runs;
    struct coordinator *coordinator;
    struct relay *relay;
    struct pairwise *pairwise;
    struct bytes request_frame;                 // the requests being sent
    bool has_joined;                            // ever joined: only then does it take part with zeros
    bool goodbye_sent;
    bool failed_elsewhere;                      // another rank's goodbye reported the failure
    struct response_cache cache;
    struct timeline timeline;
    struct FIFO(struct bhvd_operation) staged;  // their tensors are being copied from a GPU (gpu/staging.h)
    struct FIFO(struct execution) executions;
    uint64_t executing;                         // the number of the execution being run to completion; 0: none
    struct heartbeat *heartbeat;
    uint32_t polls;
    _Atomic bool measures_coordinator;
    _Atomic bool awaits_state;                  // bhvd_context_await_state
    _Atomic uint64_t measured;                  // network cost of the last execution: alpha in the upper half, beta in the lower
    struct engine_counters counters;            // links count bytes too, see bhvd_context_counters
    _Atomic uint64_t byte_counters[BHVD_BYTE_COUNTERS][3];  // as struct bhvd_sent
    struct log log;                             // for people, from any thread
    struct stalled stalled;
    bool abandoned;                             // in a child after fork

    pthread_mutex_t sets_lock;
    struct process_set_table sets;
};

// From now on nothing can be posted; ends, with this error, the operations without a response. Those with a response are
// still executed: every member relies on the others for them. If the coordinator has just left, pairwise operations
// continue, since they do not need it (core/negotiation/pairwise.h). Engine only.
void context_close(bhvd_context *ctx, const struct bhvd_error *error);

// May an operation be posted? Call with post_lock held, or from the engine.
bool context_accepts(const bhvd_context *ctx, bhvd_kind kind);

// The executor has failed: nothing can be posted, no agreed operation is executed, and every operation ends with this error.
void context_abort(bhvd_context *ctx, const struct bhvd_error *error);

// A process set is being removed: ends its operations in progress.
void context_abort_set(bhvd_context *ctx, uint32_t process_set);

// Frees one that has not begun, with its proxies, which nobody else holds.
void execution_discard(struct execution *execution);

// If requested, measures the coordinator's CPU time: from here (returns 0: not requested) ...
static inline int64_t coordinator_time_begin(const bhvd_context *ctx)
{
    return ctx->measures_coordinator && ctx->options.rank == COORDINATOR ? clock_thread_ns() : 0;
}
// ... to here.
static inline void coordinator_time_end(bhvd_context *ctx, int64_t begin_ns)
{
    if (begin_ns)
        ctx->counters.coordinator_ns += (uint64_t)(clock_thread_ns() - begin_ns);
}
