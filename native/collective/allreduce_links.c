// Which of the allreduces over links: the cheapest, or the one that was asked for.
#include "base/status.h"
#include "collective/collective.h"
#include "collective/schedules.h"

static const char *const PATH_NAMES[] = {"", "shared", "ring", "doubling", "halving", "hierarchical"};

bhvd_status allreduce_path_parse(const char *name, enum allreduce_path *path, struct bhvd_error *error)
{
    for (int i = ALLREDUCE_CHOSEN; i <= ALLREDUCE_HIERARCHICAL; i++) {
        *path = (enum allreduce_path)i;
        if (strcmp(name ? name : "", PATH_NAMES[i]) == 0)
            return BHVD_OK;
    }
    return error_set(error, BHVD_ERR_ARGUMENT, "unknown allreduce path \"%s\"; known are %s, %s, %s, %s, %s", name,
                     PATH_NAMES[1], PATH_NAMES[2], PATH_NAMES[3], PATH_NAMES[4], PATH_NAMES[5]);
}

// What an allreduce between hosts costs, in nanoseconds: a hop, as measured when they were connected but at least what the ranks
// themselves need for one; a byte on the wire each way; a byte added (in the cache: these are short vectors). Measured with
// `python -m bagua_hvd.bench --hosts` at 10 Gbit/s, see docs/performance.md; only the ratios matter, and those little. The rate is not
// measured: between hosts that are far from each other 1 Gbit/s is taken for likely, so that a hop saved is not paid for in bytes.
enum { FAR_HOP_NS = 1000000, WIRE_PS_PER_BYTE = 900, FAR_WIRE_PS_PER_BYTE = 8400, ADD_PS_PER_BYTE = 40 };

static double cost_ns(uint32_t hop_ns, double hops, double wire, double added)
{
    const double wire_ps = hop_ns >= FAR_HOP_NS ? FAR_WIRE_PS_PER_BYTE : WIRE_PS_PER_BYTE;
    return (hop_ns > HOP_NS ? hop_ns : HOP_NS) * hops + (wire_ps * wire + ADD_PS_PER_BYTE * added) / 1000.0;
}

static enum allreduce_path cheapest_over_links(int n, size_t nbytes, uint32_t hop_ns)
{
    int p = 1, rounds = 0;
    for (; 2 * p <= n; p *= 2)
        rounds++;
    const bool folds = p < n;
    const double N = (double)nbytes;
    double doubling = cost_ns(hop_ns, rounds + 2 * folds, (rounds + 2 * folds) * N, (rounds + folds) * N);
    double halving = cost_ns(hop_ns, 2 * rounds + 2 * folds, (2.0 * (p - 1) / p + 2 * folds) * N, (1.0 * (p - 1) / p + folds) * N);
    double ring = cost_ns(hop_ns, 2 * (n - 1), 2.0 * (n - 1) / n * N, 0);        // it adds while the wire is busy
    enum allreduce_path best = doubling <= halving ? ALLREDUCE_DOUBLING : ALLREDUCE_HALVING;
    return (doubling <= halving ? doubling : halving) <= ring ? best : ALLREDUCE_RING;
}

void allreduce_schedule(struct schedule *schedule, enum allreduce_path path, uint32_t hop_ns, size_t nbytes, size_t element)
{
    if (!allreduce_is_over_links(path))
        path = cheapest_over_links(schedule->size, nbytes, hop_ns);
    if (path == ALLREDUCE_DOUBLING)
        schedule_allreduce_doubling(schedule, nbytes, element);
    else if (path == ALLREDUCE_HALVING)
        schedule_allreduce_halving(schedule, nbytes, element);
    else
        schedule_allreduce_ring(schedule, nbytes, element);
}

bhvd_status allreduce_links(struct run *run, struct group *group, const struct reduction *reduction,
                            const struct span_list *list)
{
    struct schedule schedule;
    schedule_init(&schedule, group->size, group->rank);
    allreduce_schedule(&schedule, (enum allreduce_path)run->allreduce_path, run->hop_ns, list->nbytes,
                       bhvd_dtype_size(reduction->dtype));
    return flight_run(run, group, &schedule, &(struct material){.reduction = *reduction, .list = list});
}
