// Two-level allreduce: in shards (shards.h), each reduced among its owners.
// Cost: 2 N (h-1)/h elements each way per host of h, however many ranks it holds; a ring over all n ranks sends 2 N (n-1)/n
// over a host's link, and that in 2 (n-1) latencies instead of 2 (h-1).
#include "collective/collectives.h"
#include "collective/shards.h"

enum { SHARD_BYTES = 2 << 20 };         // per piece

struct allreduce {
    struct shards shards;
    enum allreduce_path path;           // of all shards
    size_t element;
};

static void write_shard(void *arg, struct schedule *schedule, size_t piece, size_t begin, size_t nbytes)
{
    const struct allreduce *x = arg;
    (void)piece, (void)begin;
    allreduce_schedule(schedule, x->path, NULL, nbytes, x->element);
}

bhvd_status allreduce_two_level(struct plan *plan, struct executor *exec, const struct group *group,
                                const struct reduction *reduction, struct span_list *list)
{
    const struct hierarchy *h = group->hierarchy;
    const struct shards_cut cut = {list->nbytes, SHARD_BYTES, SHARDS_IN_FLIGHT};
    struct reduction within = *reduction;
    within.postscale = 1.0;
    struct allreduce *x = shards_plan(exec, group, &within, list, sizeof *x, plan);
    if (!x)
        return exec->failure.status;
    x->element = bhvd_dtype_size(reduction->dtype);
    x->path = allreduce_path_over_links(exec->allreduce_path, &exec->network, h->hosts, shards_longest(h, &cut));
    plan->operands.reduction = *reduction;
    schedule_shards(&plan->schedule, h, &cut, write_shard, x);
    return BHVD_OK;
}
