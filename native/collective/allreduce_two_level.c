// Two-level allreduce (executor/two_level.h), for hosts with several members each:
//
//     reduce-scatter within each host, in shared memory:   local member s holds the host's sum of shard s
//     allreduce of shard s among its owners, over links:   every owner drives its own sockets
//     allgather within each host, in shared memory
//
// Cost: 2 N (h-1)/h elements each way per host of h, however many ranks it holds; a ring over all n ranks sends 2 N (n-1)/n
// over a host's link, and that in 2 (n-1) latencies instead of 2 (h-1).
#include <stdlib.h>

#include "base/size.h"
#include "collective/collectives.h"
#include "collective/pipelines.h"
#include "executor/hierarchy.h"
#include "executor/two_level.h"

enum { SHARD_BYTES = 2 << 20 };         // per piece

// A piece of the vector, from the reduction of its shard within the host to the distribution of the result there.
struct piece {
    struct span_list list;              // its spans
    size_t *part;                       // by local member: bytes of its shard
    struct span shard;                  // this member's shard
    struct span_list shard_list;
};

struct shards {
    struct two_level two_level;
    const struct hierarchy *h;
    struct reduction within;
    struct inter_host_stage stage;
    struct span_cursor cursor;
    struct reducescatter_pipeline reducing;
    struct allgather_pipeline distributing;
    struct piece pieces[INTER_HOST_DEPTH];
};

static size_t piece_nbytes(const struct shards *x) { return x->stage.shard_nbytes * (size_t)x->h->shards; }
static struct piece *piece_at(struct shards *x, size_t number) { return &x->pieces[number % x->two_level.depth]; }

// Cuts the next piece off the vector.
static void cut(const struct hierarchy *h, struct piece *piece, struct span_cursor *cursor, size_t most)
{
    span_list_cut(&piece->list, cursor, most);
    hierarchy_cut(h, piece->list.nbytes, piece->part);
    piece->shard.src = piece->shard.dst;
    piece->shard.nbytes = piece->part[h->index];
    piece->shard_list = (struct span_list){&piece->shard, 1, 1, piece->shard.nbytes};
}

static struct pipeline *reduce(struct executor *exec, struct two_level *l, size_t number)
{
    struct shards *x = (struct shards *)l;
    struct piece *piece = piece_at(x, number);
    (void)exec;
    cut(x->h, piece, &x->cursor, piece_nbytes(x));
    reducescatter_begin(&x->reducing, l->local, l->slot, &x->within, &piece->list, piece->shard.dst, piece->part);
    return &x->reducing.pipeline;
}

static bhvd_status inter_exchange(struct executor *exec, struct two_level *l, size_t number, struct plan *plan)
{
    struct shards *x = (struct shards *)l;
    struct piece *piece = piece_at(x, number);
    size_t begin = number * piece_nbytes(x);
    for (int i = 0; i < x->h->index; i++)
        begin += piece->part[i];
    return piece->shard.nbytes ? x->stage.plan(exec, x->h, &piece->shard_list, begin, &x->stage, plan) : BHVD_OK;
}

static struct pipeline *distribute(struct executor *exec, struct two_level *l, size_t number)
{
    struct shards *x = (struct shards *)l;
    struct piece *piece = piece_at(x, number);
    allgather_begin(&x->distributing, exec, l->local, l->slot, piece->shard.dst, &piece->list, piece->part);
    return &x->distributing.pipeline;
}

static const struct two_level_ops OPS = {.reduce = reduce, .inter_exchange = inter_exchange, .distribute = distribute};

// Bytes to reserve for the largest shard.
static size_t largest_shard(const struct shards *x)
{
    if (x->two_level.count > 1)
        return x->stage.shard_nbytes;
    hierarchy_cut(x->h, x->two_level.list.nbytes, x->two_level.part);
    return size_round_up(x->two_level.part[0], CACHE_LINE);
}

// Allocates memory for the pieces in flight: a shard each, followed by the spans. False: out of memory.
static bool lay_out(struct executor *exec, struct shards *x)
{
    struct two_level *l = &x->two_level;
    const size_t members = (size_t)l->local->size, spans = l->list.count;
    l->part = malloc(l->depth * members * sizeof *l->part);
    if (!l->part)
        return false;
    const size_t shard = largest_shard(x), stride = shard + size_round_up(spans * sizeof(struct span), CACHE_LINE);
    if (!(l->memory = executor_acquire(exec, l->depth * stride)))
        return false;
    for (size_t i = 0; i < l->depth; i++) {
        struct piece *piece = &x->pieces[i];
        piece->shard.dst = l->memory + i * stride;
        piece->list = (struct span_list){.spans = (struct span *)(void *)(piece->shard.dst + shard), .capacity = spans};
        piece->part = l->part + i * members;
    }
    return true;
}

bhvd_status two_level_shards_plan(struct plan *plan, struct executor *exec, struct group *group, const struct reduction *within,
                              struct span_list *list, const struct inter_host_stage *stage)
{
    const struct hierarchy *h = group->hierarchy;
    const size_t piece = stage->shard_nbytes * (size_t)h->shards, count = (list->nbytes + piece - 1) / piece;
    struct shards *x = two_level_create(exec, sizeof *x, &OPS, h->local, list->nbytes, count, (size_t)stage->depth);
    if (!x)
        return exec->failure.status;
    x->h = h;
    x->within = *within;
    x->stage = *stage;
    x->two_level.list = *list;
    *list = (struct span_list){0};
    x->cursor = span_cursor_at(&x->two_level.list, 0);
    return two_level_plan(exec, &x->two_level, lay_out(exec, x), plan);
}

// ----------------------------------------------------------------------------------------------------------- allreduce

static bhvd_status plan_shard(struct executor *exec, const struct hierarchy *h, const struct span_list *shard, size_t begin,
                              const struct inter_host_stage *stage, struct plan *plan)
{
    (void)begin;
    allreduce_plan(plan, exec, h->cross, &stage->reduction, shard);
    return BHVD_OK;
}

bhvd_status allreduce_two_level(struct plan *plan, struct executor *exec, struct group *group, const struct reduction *reduction,
                                   struct span_list *list)
{
    struct reduction within = *reduction;
    struct inter_host_stage stage = {.plan = plan_shard, .reduction = *reduction, .shard_nbytes = SHARD_BYTES,
                                     .depth = INTER_HOST_DEPTH};
    within.postscale = stage.reduction.prescale = 1.0;
    return two_level_shards_plan(plan, exec, group, &within, list, &stage);
}
