// Allreduce by recursive doubling, for vectors so short that the number of hops dominates: in round d rank r exchanges its whole
// vector with rank r ^ 2^d, and both add them in the same order. So all ranks end bit-equal.
// Wire: log2 p N elements each way per rank, log2 p hops; two more hops for the ranks that do not make a power of two.
#include "collective/fold.h"
#include "collective/schedules.h"

enum { WINDOW = 8 };            // received segments of a round that wait to be added, at most

// Runs all rounds for one segment of the vector. Segments wait for each other only for scratch slots: added[round] is the last step
// that read this slot.
static void exchange(struct schedule *schedule, const struct fold *fold, struct part part, size_t slot, int *added)
{
    const struct place own = in_space(IN_VECTOR, part.begin);
    int round = 0, done = added[0] = fold_begin(schedule, fold, part, in_space(IN_SCRATCH, slot * SCHEDULE_SEGMENT), added[0]);
    for (int distance = 1; distance < fold->size; distance *= 2) {
        round++;
        const int peer = fold_position(fold, fold->rank ^ distance);
        const struct place theirs = in_space(IN_SCRATCH, ((size_t)round * WINDOW + slot) * SCHEDULE_SEGMENT);
        const bool own_is_lower = !(fold->rank & distance);
        const int sent = schedule_send(schedule, peer, own, part.nbytes, done);
        const int came = schedule_receive(schedule, peer, theirs, part.nbytes, added[round]);
        done = added[round] = schedule_reduce(schedule, own, own_is_lower ? own : theirs, own_is_lower ? theirs : own,
                                              part.nbytes, schedule_both(schedule, sent, came));
    }
    fold_end(schedule, fold, part, schedule_scale(schedule, own, part.nbytes, done));
}

void schedule_allreduce_doubling(struct schedule *schedule, size_t nbytes, size_t element)
{
    const struct fold fold = fold_of(schedule->size, schedule->rank);
    int added[WINDOW][1 + FOLD_ROUNDS_MAX];
    struct part part;
    (void)element;
    for (int slot = 0; slot < WINDOW; slot++)
        for (int round = 0; round <= FOLD_ROUNDS_MAX; round++)
            added[slot][round] = STEP_NONE;
    for (size_t i = 0; (part = part_segment((struct part){0, nbytes}, i)).nbytes; i++) {
        if (fold.rank < 0)
            fold_extra(schedule, &fold, part);
        else
            exchange(schedule, &fold, part, i % WINDOW, added[i % WINDOW]);
    }
}
