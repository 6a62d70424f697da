// Reducescatter over links: every member sends every other its part, and adds the values that it receives in rank order.
// Cost: N (n-1)/n elements each way, one latency.
#include "collective/schedules.h"

// Returns the step after which the scaled rank-order sum of one segment of the own part is in the scratch at `sum`.
static int add_all(struct schedule *schedule, struct byte_range cut, struct location own, struct location sum, size_t mine,
                   int own_is_there)
{
    struct location so_far = own;
    int done = own_is_there;
    for (int i = 0; i < schedule->size; i++) {
        struct location value = own;
        if (i != schedule->rank) {
            value = in_buffer(SCRATCH_BUFFER, (size_t)i * mine + cut.begin);
            done = schedule_both(schedule, done, schedule_receive(schedule, i, value, cut.nbytes, STEP_NONE));
        }
        if (i == 0) {
            so_far = value;
            continue;
        }
        done = schedule_reduce(schedule, sum, so_far, value, cut.nbytes, done);
        so_far = sum;
    }
    if (schedule->size == 1)
        done = schedule_copy(schedule, sum, own, cut.nbytes, done);
    return schedule_scale(schedule, sum, cut.nbytes, done);
}

void schedule_reducescatter(struct schedule *schedule, const size_t *part, bool loads)
{
    const int n = schedule->size, me = schedule->rank;
    const enum buffer_kind values = loads ? FUSION_BUFFER : INPUT_BUFFER;
    const size_t mine = part[me];
    size_t offset = 0, my_offset = 0;
    struct byte_range cut;
    int all = STEP_NONE;            // after this step the input is read and the sums are complete: the result may be written
    for (int i = 0; i < n; offset += part[i++]) {
        if (i == me)
            my_offset = offset;
        for (size_t s = 0; i != me && (cut = byte_range_segment((struct byte_range){offset, part[i]}, s)).nbytes; s++) {
            const int loaded = loads ? schedule_load(schedule, cut, STEP_NONE) : STEP_NONE;
            const int sent = schedule_send(schedule, i, in_buffer(values, cut.begin), cut.nbytes, loaded);
            all = schedule_both(schedule, all, sent);
        }
    }
    for (size_t s = 0; (cut = byte_range_segment((struct byte_range){0, mine}, s)).nbytes; s++) {
        const struct byte_range own = {my_offset + cut.begin, cut.nbytes};
        const struct location sum = in_buffer(SCRATCH_BUFFER, (size_t)me * mine + cut.begin);
        const int loaded = loads ? schedule_load(schedule, own, STEP_NONE) : STEP_NONE;
        all = schedule_both(schedule, all, add_all(schedule, cut, in_buffer(values, own.begin), sum, mine, loaded));
    }
    if (mine)
        schedule_copy(schedule, in_buffer(OUTPUT_BUFFER, 0), in_buffer(SCRATCH_BUFFER, (size_t)me * mine), mine, all);
}
