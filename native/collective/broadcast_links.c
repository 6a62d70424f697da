// Broadcast over links. Ranks are counted from the root. Segments are forwarded on arrival, so all levels are busy at once.
// Tree (binomial): rank v has its parent at v without its lowest set bit, and its children at v + 2^k for every 2^k below that bit.
// ceil(log2 n) latencies; the root sends each byte that often. Chain: rank v's child is v + 1. n-1 latencies; a rank sends each
// byte once.
#include "collective/collectives.h"
#include "collective/schedules.h"

bool broadcast_by_chain(int n, const struct network_cost *network, size_t nbytes)
{
    const double alpha = network_alpha_ns(network), beta = network_beta_ps(network) / 1000.0;
    const double tree = doubling_rounds(n) * (alpha + beta * (double)nbytes);
    const double chain = (n - 1) * alpha + beta * ((double)nbytes + (n - 2.0) * SCHEDULE_SEGMENT);
    return nbytes > SCHEDULE_SEGMENT && chain < tree;
}

void schedule_broadcast(struct schedule *schedule, int root, size_t nbytes, bool chain)
{
    const int n = schedule->size, me = (schedule->rank - root + n) % n;
    const int parent = ((chain ? me + n - 1 : me & (me - 1)) + root) % n;
    int first_child = chain ? 2 : 1;        // twice the distance to the child with the largest subtree, which is served first
    while (!chain && first_child < n && !(me & first_child))
        first_child *= 2;
    struct byte_range range;
    for (size_t s = 0; (range = byte_range_segment((struct byte_range){0, nbytes}, s)).nbytes; s++) {
        const struct location location = in_buffer(OUTPUT_BUFFER, range.begin);
        const int there = me ? schedule_receive(schedule, parent, location, range.nbytes, STEP_NONE)
                             : schedule_copy(schedule, location, in_buffer(INPUT_BUFFER, range.begin), range.nbytes, STEP_NONE);
        for (int child = first_child / 2; child; child /= 2)
            if (me + child < n)
                schedule_send(schedule, (me + child + root) % n, location, range.nbytes, there);
    }
}

void broadcast_plan(struct plan *plan, const struct group *group, int root, const void *src, void *dst, size_t nbytes, bool chain)
{
    schedule_broadcast(plan_begin(plan, group), root, nbytes, chain);
    plan->operands = (struct operands){.input = src, .output = dst};
}
