// Hierarchical allreduce: in shards (shards.h), each reduced among its owners.
// Cost: 2 N (h-1)/h elements each way per host of h, however many ranks it holds; a ring over all n ranks sends 2 N (n-1)/n
// over a host's link, and that in 2 (n-1) latencies instead of 2 (h-1).
#include "collective/collectives.h"
#include "collective/shards.h"

static void write_shard(const struct shards *x, struct schedule *schedule, struct byte_range mine)
{
    allreduce_schedule(schedule, x->exec->allreduce_path, &x->network, mine.nbytes, bhvd_dtype_size(x->within.dtype));
}

bhvd_status allreduce_hierarchical(struct plan *plan, struct executor *exec, const struct group *group,
                                   const struct reduction *reduction, struct span_list *list)
{
    static const struct shards_work work = {.shard_nbytes = 2 << 20, .in_flight = SHARDS_IN_FLIGHT, .write = write_shard};
    struct reduction within = *reduction;
    within.postscale = 1.0;
    const bhvd_status status = shards_plan(exec, group, NULL, &within, &work, list, plan);
    if (!status)
        plan->operands.reduction = *reduction;
    return status;
}
