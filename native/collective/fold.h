// Reduces n ranks to a power of two, p, for algorithms that pair ranks by a bit of their number. Of the first 2 (n - p) ranks, the
// even ones send their vectors to their odd neighbors and receive the result at the end.
#pragma once

#include "executor/schedule.h"

enum { FOLD_ROUNDS_MAX = 30 };

struct fold {
    int size;                   // p
    int extra;                  // n - p
    int rank;                   // this rank's number among the p; -1: it gives its neighbor its vector, and gets the result
    int neighbor;               // position of the neighbor that sends and receives; -1: none
};

static inline struct fold fold_of(int n, int rank)
{
    struct fold fold = {.size = 1, .neighbor = -1};
    while (2 * fold.size <= n)
        fold.size *= 2;
    fold.extra = n - fold.size;
    fold.rank = rank - fold.extra;
    if (rank < 2 * fold.extra) {
        fold.rank = rank % 2 ? rank / 2 : -1;
        fold.neighbor = rank ^ 1;
    }
    return fold;
}

// Position of the rank with this number among the p.
static inline int fold_position(const struct fold *fold, int rank)
{
    return rank < fold->extra ? 2 * rank + 1 : rank + fold->extra;
}

// For a rank outside the p: sends this part, and receives the result.
static inline void fold_extra(struct schedule *schedule, const struct fold *fold, struct byte_range range)
{
    const struct location own = in_buffer(FUSION_BUFFER, range.begin);
    const int sent = schedule_send(schedule, fold->neighbor, own, range.nbytes, schedule_load(schedule, range, STEP_NONE));
    schedule_store(schedule, range, schedule_receive(schedule, fold->neighbor, own, range.nbytes, sent));
}

// For the others: loads this part, and adds the neighbor's, which is received into `received` after step `after`.
static inline int fold_begin(struct schedule *schedule, const struct fold *fold, struct byte_range range, struct location received,
                             int after)
{
    const struct location own = in_buffer(FUSION_BUFFER, range.begin);
    const int loaded = schedule_load(schedule, range, STEP_NONE);
    if (fold->neighbor < 0)
        return loaded;
    const int came = schedule_receive(schedule, fold->neighbor, received, range.nbytes, after);
    return schedule_reduce(schedule, own, received, own, range.nbytes, schedule_both(schedule, loaded, came));
}

// Sends the result of this part to the neighbor, and stores it in the tensors.
static inline void fold_end(struct schedule *schedule, const struct fold *fold, struct byte_range range, int done)
{
    if (fold->neighbor >= 0)
        schedule_send(schedule, fold->neighbor, in_buffer(FUSION_BUFFER, range.begin), range.nbytes, done);
    schedule_store(schedule, range, done);
}
