// Allreduce in two levels (hierarchy.h), for hosts with several members each:
//
//     reduce-scatter within each host, in shared memory:   local member s holds the host's sum of shard s
//     allreduce of shard s among its owners, over links:   every owner drives its own sockets
//     allgather within each host, in shared memory
//
// Wire: 2 N (h-1)/h elements each way per host of h, however many ranks it holds; a ring over all n ranks sends 2 N (n-1)/n
// over a host's link, and that in 2 (n-1) hops instead of 2 (h-1). A vector is worked off in pieces, so that a member
// without a shard is never left waiting for longer than one piece takes.
#include <stdlib.h>

#include "collective/collective.h"
#include "run/hierarchy.h"
#include "run/shared.h"

enum { SHARD_MAX_BYTES = 16 << 20 };

static bhvd_status run_piece(struct run *run, const struct hierarchy *h, const struct reduction *within,
                             const struct span_list *piece, size_t begin, size_t *part, hierarchical_fn between, void *arg)
{
    hierarchy_cut(h, piece->nbytes, part);
    const size_t mine = part[h->index];
    unsigned char *shard = fusion_acquire(run, 0, mine);
    if (!shard)
        return run_fail(run, BHVD_ERR_SYSTEM, "no memory for a fusion buffer of %zu bytes", mine);
    bhvd_status status = reducescatter_shared(run, h->local, within, piece, shard, part);
    if (!status && mine) {
        struct span span = {shard, shard, mine};
        for (int i = 0; i < h->index; i++)
            begin += part[i];
        status = between(run, h->cross, &(struct span_list){&span, 1, 1, mine}, begin, arg);
    }
    return status ? status : allgather_shared(run, h->local, shard, piece, part);
}

bhvd_status hierarchical_run(struct run *run, struct group *group, const struct reduction *within,
                             const struct span_list *list, hierarchical_fn between, void *arg)
{
    const struct hierarchy *h = group->hierarchy;
    const size_t most = (size_t)SHARD_MAX_BYTES * (size_t)h->shards;
    size_t *part = malloc((size_t)h->local->size * sizeof *part);
    struct span *spans = malloc(list->count * sizeof *spans);
    bhvd_status status = BHVD_OK;
    if (!part || !spans)
        status = run_fail(run, BHVD_ERR_SYSTEM, "no memory for %zu fused tensors", list->count);
    struct span_cursor cursor = span_cursor_at(list, 0);
    for (size_t begin = 0; begin < list->nbytes && !status;) {
        struct span_list piece = {spans, 0, list->count, 0};
        struct span *next = spans;
        for (size_t n; (n = span_cursor_next(&cursor, most - piece.nbytes, &next->src, &next->dst)); next++) {
            next->nbytes = n;
            piece.nbytes += n;
            piece.count++;
            if (piece.nbytes == most)
                break;
        }
        status = run_piece(run, h, within, &piece, begin, part, between, arg);
        begin += piece.nbytes;
    }
    free(part);
    free(spans);
    return status;
}

static bhvd_status allreduce_shard(struct run *run, struct group *cross, const struct span_list *shard,
                                   size_t begin, void *arg)
{
    (void)begin;
    return allreduce_links(run, cross, arg, shard);
}

bhvd_status allreduce_hierarchical(struct run *run, struct group *group, const struct reduction *reduction,
                                   const struct span_list *list)
{
    struct reduction within = *reduction, across = *reduction;
    within.postscale = across.prescale = 1.0;
    return hierarchical_run(run, group, &within, list, allreduce_shard, &across);
}
