// The coordinator: rank 0's second role in negotiation. It collects requests until all members of the
// process set have sent theirs, checks that they agree, decides which are fused, and responds. Empty on other ranks. Engine only.
//
//     coordinator.c    takes requests, joins and goodbyes
//     pending.c        an operation that waits for members; checks that they agree
//     responses.c      refuses complete operations that cannot be done, fuses the others, and responds
//
// The path of a request, to rank 0 and back (relays forward it):
//
//     member_request -> relay_send_requests -> relay_on_up -> coordinator_on_requests -> responses_enqueue (when complete)
//     engine_poll -> coordinator_respond -> responses_send -> relay_on_down -> member_on_response
//
// A known request is only an id in the first line, and a known response only ids in the second: ranks still wait for the response.
#pragma once

#include "core/context/context.h"
#include "core/negotiation/pending.h"

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
    struct FIFO(struct pending) refused;        // refused before some members sent their requests, which will come
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

bhvd_status coordinator_init(bhvd_context *ctx);
void coordinator_fini(bhvd_context *ctx);

// Takes requests that each of these ranks (ascending) sent. The error names the rank.
bhvd_status coordinator_on_requests(bhvd_context *ctx, const int *ranks, int count, struct bytes_reader items);
// Ends operations that can no longer complete without this rank.
void coordinator_on_goodbye(bhvd_context *ctx, int rank);
// Has a member left? The error names the first: others may have left because of it. Always false on other ranks.
bool coordinator_any_departed(const bhvd_context *ctx, const struct process_set *set, struct bhvd_error *error);
// Responds to complete operations.
bhvd_status coordinator_respond(bhvd_context *ctx);

// Called after an execution has added or removed a process set: handles deferred requests; ends operations that wait
// for a removed set. Does nothing on other ranks.
bhvd_status coordinator_set_added(bhvd_context *ctx);
bhvd_status coordinator_set_removed(bhvd_context *ctx, struct process_set *set);

// The window: how many executions may be in flight at once, the newest included. It is in each response of the coordinator, so it
// is equal on all ranks (engine_has_next obeys it, core/negotiation/member.h says why this excludes deadlock).
// Bounds the memory: total bytes of concurrent executions, unless there is only one. Small ones may always be concurrent.
enum { WINDOW_BYTES = 128 << 20, WINDOW_SMALL_BYTES = 64 << 10 };
#define WINDOW_ALONE SIZE_MAX           // nbytes of an execution that must be the only one

// nbytes: of the last executions, by their number modulo LINK_MATCH_QUEUES; newest: the number of the last, from 1.
static inline int window_of(const size_t *nbytes, uint64_t newest)
{
    size_t total = nbytes[newest % LINK_MATCH_QUEUES];
    const bool is_small = total <= WINDOW_SMALL_BYTES;
    int window = 1;
    for (; total != WINDOW_ALONE && window < LINK_MATCH_QUEUES && (uint64_t)window < newest; window++) {
        const size_t n = nbytes[(newest - (uint64_t)window) % LINK_MATCH_QUEUES];
        if (n == WINDOW_ALONE || (!is_small && (n > WINDOW_BYTES || total + n > WINDOW_BYTES)))
            break;
        total += is_small ? 0 : n;
    }
    return window;
}

// responses.c, for coordinator.c.

// Moves a pending operation, which is complete, to the ready ones.
void responses_enqueue(struct coordinator *c, struct pending *pending);
// Responds to all ready operations, in time linear in their number.
bhvd_status responses_send(bhvd_context *ctx);
// All ranks have joined.
bhvd_status response_send_join(bhvd_context *ctx, const struct operation_key *key);
// Ends an operation with an error, on all members that have requested it / on one rank.
bhvd_status response_refuse_all(bhvd_context *ctx, const struct pending *pending, const struct bhvd_error *error);
bhvd_status response_refuse(bhvd_context *ctx, int rank, const struct operation_key *key, const struct bhvd_error *error);
// Asks for the full request of an unknown id. BHVD_ERR_PROTOCOL: the rank has left too many such questions without a reply.
bhvd_status response_send_cache_miss(bhvd_context *ctx, int rank, uint32_t id);

// Refuses a pending operation that members have revoked (pairwise.h), before the others request it.
bhvd_status refuse_revoked(bhvd_context *ctx, struct pending *pending);
// Each of the others requests it once, when it revokes it too; a later request is not a revoked one. True: this was that
// request, and it was refused like those before.
bool refuse_late_request(bhvd_context *ctx, const struct process_set *set, int rank, struct request *request, bhvd_status *status);
// Ends the operations of a removed set: expects no more of these requests, and responds to no complete ones.
void responses_forget_set(struct coordinator *c, const struct process_set *set);

void responses_fini(struct coordinator *c);
