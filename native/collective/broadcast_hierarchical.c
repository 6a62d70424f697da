// Hierarchical broadcast: over links to the members with the root's local index, one on each host. Each of them forwards every
// piece, and copies it in for its host. A host receives the vector once, however many members it holds.
#include <stdlib.h>

#include "base/size.h"
#include "collective/collectives.h"
#include "collective/pipelines.h"
#include "collective/schedules.h"
#include "executor/hierarchy.h"

enum { PIECES = 64 };                   // at most: each is a pipeline

struct broadcast {
    struct group *local;
    int index;                          // the root's
    struct broadcast_pipeline distributing;
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
