// Broadcast over links. Ranks are counted from the root. Segments are forwarded on arrival, so all levels are busy at once.
// Tree (binomial): rank v has its parent at v without its lowest set bit, and its children at v + 2^k for every 2^k below that bit.
// ceil(log2 n) latencies; the root sends each byte that often. Chain: rank v's child is v + 1. n-1 latencies; a rank sends each
// byte once.
#include "collective/collectives.h"

#include <stdlib.h>

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
    for_each_segment(range, (struct byte_range){0, nbytes}) {
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

// -------------------------------------------------------------------------------------------------------- hierarchical

// Hierarchical broadcast: over links to the members with the root's local index, one on each host. Each of them forwards every
// piece, and copies it in for its host. A host receives the vector once, however many members it holds.

enum { PIECES = 64 };                   // at most: each is a pipeline

struct broadcast {
    struct group *local;
    int index;                          // the root's
    struct exchange_pipeline distributing;
};

static struct pipeline *begin_pipeline(void *arg, struct executor *exec, int slot, const struct step *step,
                                       unsigned char *const *buffers)
{
    struct broadcast *b = arg;
    unsigned char *piece = location_pointer(buffers, step->from);
    broadcast_begin(&b->distributing, exec, b->local, slot, b->index, piece, piece, step->nbytes);
    return &b->distributing.pipeline;
}

bhvd_status broadcast_hierarchical(struct plan *plan, struct executor *exec, const struct group *group, int root, const void *src,
                                   void *dst, size_t nbytes)
{
    const struct hierarchy *h = group->hierarchy;
    const size_t piece = schedule_piece(nbytes, PIECES);
    const bool chain = broadcast_by_chain(h->hosts, &exec->network, nbytes);
    struct broadcast *b = malloc(sizeof *b);
    int host, index;
    if (!b)
        return executor_fail(exec, BHVD_ERR_SYSTEM, "no memory for an operation of %zu bytes", nbytes);
    hierarchy_find(h, root, &host, &index);
    *b = (struct broadcast){.local = h->local, .index = index};
    struct schedule *schedule = plan_begin(plan, hierarchy_senders(h));
    for (size_t at = 0; at < nbytes; at += piece) {
        const struct location in = in_buffer(INPUT_BUFFER, at), out = in_buffer(OUTPUT_BUFFER, at);
        const size_t n = size_min(piece, nbytes - at);
        const struct schedule_part part = {.after = STEP_NONE, .base = {[INPUT_BUFFER] = in, [OUTPUT_BUFFER] = out}};
        int there = STEP_NONE;
        if (h->index == index) {
            schedule_begin_part(schedule, &part);
            schedule_broadcast(schedule, host, n, chain);
            there = schedule_end_part(schedule);
        }
        schedule_distribute_within(schedule, 0, out, n, (struct byte_range){at, n}, there);
    }
    plan->release = free;
    plan->operands = (struct operands){.input = src, .output = dst, .begin_pipeline = begin_pipeline, .local = h->local, .arg = b};
    return BHVD_OK;
}
