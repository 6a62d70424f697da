// Pairwise operations: averaging with neighbors without the coordinator.
//
// What each member of a set has asked for twice in the same way (D_FP_S, D_LP_S between ranks), the coordinator answers as
// *persistent*: from now on this name, asked for in this way, needs nobody's answer. Who is to be met follows from the request
// (primitive/peers.h), and each pair matches by the numbers of its own pairwise operations:
//
//     member    posts -> READY(id, number) to each neighbor; starts when each of them has said the same number
//
// A late rank delays its neighbors, and nobody else. READY goes before the first message, so data comes only to who has posted.
//
// Who asks for the name in another way, or joins, REVOKEs from its neighbors first. Who waits for one that has revoked it parts, too,
// and asks the coordinator, which compares what those ask that have revoked it as soon as it comes: others may never ask.
// Of pairwise operations beyond the last that it takes part in, who parts says so; to be in one already is an error of the program.
// Thread: the engine's.
#ifndef BHVD_PAIRWISE_H
#define BHVD_PAIRWISE_H

#include "base/bytes.h"
#include "core/negotiation/response_cache.h"
#include "run/schedule.h"

struct link;
struct process_set;
struct persistent;

struct pairwise {
    struct cached_list all;
    struct persistent *waiting;         // whose operation has not started
    bool changed;                       // one of them may start now
    int agreed;                         // coordinator: how many stand
    int64_t next_look_ns;
};

struct pairwise *pairwise_create(void);        // NULL: no memory
void pairwise_destroy(struct pairwise *pairwise);

// Coordinator: may what all members ask for stand from now on?
bool pairwise_may_persist(bhvd_context *ctx, struct process_set *set, const struct request *request);
// Coordinator: `count` of them are asked for again, or their set is removed.
void pairwise_release(bhvd_context *ctx, struct process_set *set, int count);
// Member: it stands; the operation that it was answered for is executed as ever.
bhvd_status pairwise_begin(bhvd_context *ctx, const struct bhvd_handle *op, uint32_t id, const struct wire *wire);

enum pairwise_state {
    PAIRWISE_NONE,      // to be asked for as ever
    PAIRWISE_WAITS,     // it waits for its neighbors
    PAIRWISE_REVOKED    // to be asked for in full, as by one that has revoked it
};
enum pairwise_state pairwise_post(bhvd_context *ctx, struct bhvd_handle *op);
// Parts from all neighbors: this rank joins.
void pairwise_revoke_all(bhvd_context *ctx);

// A neighbor's frames.
bhvd_status pairwise_take_ready(bhvd_context *ctx, struct link *link, struct bytes_reader payload);
bhvd_status pairwise_take_revoke(bhvd_context *ctx, struct link *link, struct bytes_reader payload);
// A rank has left: ends what waits for it.
void pairwise_take_goodbye(bhvd_context *ctx, int rank);
// Of a process set that is being removed.
void pairwise_forget_set(bhvd_context *ctx, uint32_t process_set);

// The next operation that may start, or has ended: its reference is the caller's. NULL: none.
struct bhvd_handle *pairwise_next(bhvd_context *ctx, uint32_t *id, struct wire *wire);
// At the clock: who is waited for too long?
void pairwise_check_stalls(bhvd_context *ctx);

#endif
