// The coordinator: rank 0's second role in negotiation. It collects requests until all members of the
// process set have sent theirs, checks that they agree, decides which are fused, and responds. Empty on other ranks. Engine only.
//
//     coordinator.c    takes requests, joins and goodbyes
//     fuse.c           fuses complete operations and responds
//     refuse.c         responds with an error to those that cannot be done
//     pending.c        an operation that waits for members; checks that they agree
//     response.c       writes and sends responses
//
// The path of a request, to rank 0 and back (relays forward it):
//
//     member_request -> relay_send_requests -> relay_on_up -> coordinator_on_requests -> fuse_enqueue (all members have sent it)
//     engine_poll -> coordinator_respond -> fuse_respond -> relay_on_down -> member_on_response
//
// A known request is only an id in the first line, and a known response only ids in the second: ranks still wait for the response.
#pragma once

#include "base/clock.h"
#include "base/fifo.h"
#include "core/context/context.h"
#include "core/message/frame.h"
#include "core/message/id_range.h"
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
    int left;                                   // it said goodbye, as the n-th rank; 0: it has not
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
    int left_count;
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

bhvd_status coordinator_init(bhvd_context *ctx);
void coordinator_fini(bhvd_context *ctx);

// Takes requests that each of these ranks (ascending) sent. The error names the rank.
bhvd_status coordinator_on_requests(bhvd_context *ctx, const int *ranks, int count, struct bytes_reader items);
// Ends operations that can no longer complete without this rank.
void coordinator_on_goodbye(bhvd_context *ctx, int rank);
// Has a member left? The error names the first: others may have left because of it. Always false on other ranks.
bool coordinator_any_left(const bhvd_context *ctx, const struct process_set *set, struct bhvd_error *error);
// Responds to complete operations.
bhvd_status coordinator_respond(bhvd_context *ctx);

// Called after an execution has added or removed a process set: handles deferred requests; ends operations that wait
// for a removed set. Does nothing on other ranks.
bhvd_status coordinator_set_added(bhvd_context *ctx);
bhvd_status coordinator_set_removed(bhvd_context *ctx, struct process_set *set);
