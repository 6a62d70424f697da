// Allreduce by recursive doubling, for vectors so short that latency dominates: in round d rank r exchanges its whole
// vector with rank r ^ 2^d, and both add them in the same order. So all ranks end bit-equal.
// Cost: log2 p N elements each way per rank, log2 p latencies; two more for the ranks that do not make a power of two.
#include "collective/fold.h"
#include "collective/schedules.h"

enum { SEGMENTS_IN_FLIGHT = 8 };  // received segments of a round that wait to be added, at most

// Runs all rounds for one segment of the vector. Segments wait for each other only for scratch slots: added[round] is the last step
// that read this slot.
static void exchange(struct schedule *schedule, const struct fold *fold, struct byte_range range, size_t slot, int *added)
{
    const struct location own = in_buffer(FUSION_BUFFER, range.begin);
    int round = 0, done = added[0] = fold_begin(schedule, fold, range, in_buffer(SCRATCH_BUFFER, slot * SCHEDULE_SEGMENT),
                                                added[0]);
    for (int distance = 1; distance < fold->size; distance *= 2) {
        round++;
        const int peer = fold_position(fold, fold->rank ^ distance);
        const struct location theirs = in_buffer(SCRATCH_BUFFER, ((size_t)round * SEGMENTS_IN_FLIGHT + slot) * SCHEDULE_SEGMENT);
        const bool own_is_lower = !(fold->rank & distance);
        const int sent = schedule_send(schedule, peer, own, range.nbytes, done);
        const int came = schedule_receive(schedule, peer, theirs, range.nbytes, added[round]);
        done = added[round] = schedule_reduce(schedule, own, own_is_lower ? own : theirs, own_is_lower ? theirs : own,
                                              range.nbytes, schedule_both(schedule, sent, came));
    }
    fold_end(schedule, fold, range, schedule_scale(schedule, own, range.nbytes, done));
}

void schedule_allreduce_doubling(struct schedule *schedule, size_t nbytes)
{
    const struct fold fold = fold_of(schedule->size, schedule->rank);
    int added[SEGMENTS_IN_FLIGHT][1 + FOLD_ROUNDS_MAX];
    struct byte_range range;
    for (int slot = 0; slot < SEGMENTS_IN_FLIGHT; slot++)
        for (int round = 0; round <= FOLD_ROUNDS_MAX; round++)
            added[slot][round] = STEP_NONE;
    for (size_t i = 0; (range = byte_range_segment((struct byte_range){0, nbytes}, i)).nbytes; i++) {
        if (fold.rank < 0)
            fold_extra(schedule, &fold, range);
        else
            exchange(schedule, &fold, range, i % SEGMENTS_IN_FLIGHT, added[i % SEGMENTS_IN_FLIGHT]);
    }
}
