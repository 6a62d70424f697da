// Two-level allreduce: in shards (shards.h), each reduced among its owners.
// Cost: 2 N (h-1)/h elements each way per host of h, however many ranks it holds; a ring over all n ranks sends 2 N (n-1)/n
// over a host's link, and that in 2 (n-1) latencies instead of 2 (h-1).
#include "collective/collectives.h"
#include "collective/shards.h"

enum { SHARD_BYTES = 2 << 20 };         // per piece

struct within_shard {
    enum allreduce_path path;
    size_t element;
};

static void write_shard(const void *arg, struct schedule *schedule, size_t piece, size_t nbytes)
{
    const struct within_shard *x = arg;
    (void)piece;
    allreduce_schedule(schedule, x->path, NULL, nbytes, x->element);
}

bhvd_status allreduce_two_level(struct plan *plan, struct executor *exec, const struct group *group,
                                const struct reduction *reduction, struct span_list *list)
{
    struct reduction within = *reduction;
    within.postscale = 1.0;
    const struct shards *x = shards_plan(exec, group, NULL, &within, SHARD_BYTES, SHARDS_IN_FLIGHT, list, plan);
    if (!x)
        return exec->failure.status;
    // All shards on one path, that of the longest.
    const struct within_shard shard = {
        allreduce_path_over_links(exec->allreduce_path, &x->network, x->h->hosts, shards_longest(x->h, &x->cut)),
        bhvd_dtype_size(reduction->dtype)};
    plan->operands.reduction = *reduction;
    schedule_shards(&plan->schedule, x->h, &x->cut, write_shard, &shard);
    return BHVD_OK;
}
