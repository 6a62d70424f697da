// Broadcast over links by a binomial tree: with ranks counted from the root, rank v has its parent at v without its
// lowest set bit, and its children at v + 2^k for every 2^k below that bit. ceil(log2 n) hops. Segments are passed on
// as they come, so that all levels are busy at once.
#include "collective/collective.h"
#include "collective/schedules.h"

void schedule_broadcast(struct schedule *schedule, int root, size_t nbytes)
{
    const int n = schedule->size, me = (schedule->rank - root + n) % n, parent = ((me & (me - 1)) + root) % n;
    int first_child = 1;        // of the largest subtree, which comes first
    while (first_child < n && !(me & first_child))
        first_child *= 2;
    struct part part;
    for (size_t s = 0; (part = part_segment((struct part){0, nbytes}, s)).nbytes; s++) {
        const struct place place = in_space(IN_OUTPUT, part.begin);
        const int there = me ? schedule_receive(schedule, parent, place, part.nbytes, STEP_NONE)
                             : schedule_copy(schedule, place, in_space(IN_INPUT, part.begin), part.nbytes, STEP_NONE);
        for (int child = first_child / 2; child; child /= 2)
            if (me + child < n)
                schedule_send(schedule, (me + child + root) % n, place, part.nbytes, there);
    }
}

void broadcast_plan(struct plan *plan, const struct group *group, int root, const void *src, void *dst, size_t nbytes)
{
    schedule_broadcast(plan_begin(plan, group), root, nbytes);
    plan->operands = (struct operands){.input = src, .output = dst};
}
