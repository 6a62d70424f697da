// The coordinator's state (coordinator.h). Empty on other ranks. Engine only.
#pragma once

#include "base/clock.h"
#include "base/containers.h"
#include "core/context/context.h"
#include "core/message/frame.h"
#include "core/negotiation/pending.h"
#include "executor/schedule.h"
#include "transport/link.h"

// The requests of one rank.
struct requester {
    uint64_t operations;                        // number of requests
    int64_t at_ns;                              // time of the last one
    struct request *last;                       // the last one; NULL: none
    int cache_misses;                           // CACHE_MISSes without a reply: they concern operations posted before its join
    bool joined;
    int departed;                               // it said goodbye, as the n-th rank; 0: it has not
    _Atomic uint64_t requested_last, waited_ns;  // operations that it requested last; total time since the second-to-last request
};

// A request for a process set that this rank has not added yet.
struct deferred_request {
    struct deferred_request *next;
    int rank;
    struct request *request;
};

struct coordinator {
    struct table pending;
    struct FIFO(struct pending) ready;         // complete, in the order of completion, without a response so far
    struct FIFO(struct pending) refused;        // refused before some members sent their requests, which will come (refuse.h)
    int joined_count, last_joined;
    int departed_count;
    int additions;                              // process sets with a response that are not added here yet ...
    struct FIFO(struct deferred_request) deferred_requests;   // ... and requests for them from ranks that are ahead
    int requesting_rank;                        // the rank that sent the current request
    int64_t next_stall_check_ns;
    uint64_t response_number;                   // of the last response begun
    struct network_cost network;                // alpha: to the farthest rank; beta: of the slowest line
    size_t nbytes_of[LINK_MATCH_QUEUES];        // sizes of the last executions, by number
    struct bytes out;                           // the frame being written
    struct id_range range;                      // at the end of `out`
    struct requester requesters[];              // by global rank
};

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
