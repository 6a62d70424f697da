// Pairwise operations: averaging with neighbors, without the coordinator.
//
// When all members of a set request the same D_FP_S or D_LP_S a second time, the coordinator responds that it is pairwise.
// From then on a rank that posts it again signals its neighbors instead:
//
//     member    posts -> READY(id, number) to each neighbor; starts when each of them has sent the same number
//
// The request determines the neighbors (primitive/peers.h); each pair counts its own operations. A late rank delays only its
// neighbors. READY precedes the first message, so data reaches only ranks that have posted.
//
// A rank that requests the name differently, joins, removes the process set or leaves sends REVOKE(id, last number, rank that left;
// -1: none) to its neighbors. A neighbor that waits for a later number revokes too, and requests it from the coordinator; if it
// had promised that number, it now sends a lower one. The coordinator compares requests of revoking ranks at once, because the
// other ranks may never send theirs. A neighbor that has started a later number fails the job: a rank left, or the program is
// wrong. A leaving rank waits for the last number that it has promised: a neighbor that has not posted it responds with REVOKE.
// Thread: holder of engine_lock.
#pragma once

#include "core/context/response_cache.h"
#include "executor/schedule.h"

enum { NOBODY_DEPARTED = -1 };

struct link;
struct process_set;
struct pairwise_entry;

struct pairwise {
    struct lru_cache all;
    struct pairwise_entry *waiting;     // those with an operation that has not started
    bool changed;                       // one of them may start now
    int count;                          // coordinator: number of pairwise operations
    int64_t next_check_ns;
};

struct pairwise *pairwise_create(void);        // NULL: no memory
void pairwise_destroy(struct pairwise *pairwise);

// Coordinator: makes the request, equal on all members, pairwise if it can be; counts it then.
bool pairwise_try_begin(bhvd_context *ctx, struct process_set *set, const struct request *request);
// Coordinator: `count` operations of a set need it again, or the set is removed.
void pairwise_release(bhvd_context *ctx, struct process_set *set, int count);
// Member: the operation becomes pairwise. The execution of this response runs as usual. BHVD_ERR_SYSTEM: no memory.
bhvd_status pairwise_begin(bhvd_context *ctx, const struct bhvd_operation *op, uint32_t id, const struct network_cost *network);

enum pairwise_state {
    PAIRWISE_NONE,              // not pairwise: request it from the coordinator
    PAIRWISE_WAITS,             // for its neighbors
    PAIRWISE_REVOKED,           // request it in full, as ITEM_REVOKED
    PAIRWISE_FAILED             // the executor has failed, which has ended it and all others
};
enum pairwise_state pairwise_post(bhvd_context *ctx, struct bhvd_operation *op);
// Revokes all (process_set NULL) when this rank joins, or leaves but must stay for others; or those of a process set that is being
// removed. A waiting operation still starts when its neighbors have posted it, since one of them may have started it already.
// departed: the rank that left, or NOBODY_DEPARTED. An error has failed the context, and ended all operations.
bhvd_status pairwise_revoke(bhvd_context *ctx, const uint32_t *process_set, int departed);

// A neighbor has posted an operation, or revokes one: the protocol above.
bhvd_status pairwise_on_ready(bhvd_context *ctx, struct link *link, struct bytes_reader payload);
bhvd_status pairwise_on_revoke(bhvd_context *ctx, struct link *link, struct bytes_reader payload);
// A rank has left: ends operations that wait for it.
void pairwise_on_goodbye(bhvd_context *ctx, int rank);
// This rank leaves: waiting operations are its last. Each neighbor sends READY for them, responds with REVOKE, or says goodbye.
// Call it until none waits.
void pairwise_leave(bhvd_context *ctx);
// Does an operation of this set wait for its neighbors?
bool pairwise_set_waits(const bhvd_context *ctx, uint32_t process_set);
// Call after the set is removed and none of its operations runs.
void pairwise_forget_set(bhvd_context *ctx, uint32_t process_set);

// The next operation that may start, or has ended: the caller owns its reference. NULL: none.
struct bhvd_operation *pairwise_next(bhvd_context *ctx, uint32_t *id, struct network_cost *network);
// Warns about late neighbors, and ends the job if that was requested.
void pairwise_check_stalls(bhvd_context *ctx);
