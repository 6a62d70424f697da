// Selects the allreduce over links: the cheapest, or the requested one.
#include "base/status.h"
#include "collective/collectives.h"
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

// Cost of an allreduce between hosts, in nanoseconds. A hop and a byte on the wire are measured when ranks connect; a hop costs at
// least the ranks' own overhead. For the cost of adding a byte see `python -m tests.laboratory --hosts` and docs/performance.md.
// The wire idles at the start of each round that waits for the whole previous round: hosts have different delays, and another
// connection has to speed up. Only the ratios matter, and these only slightly.
enum { ADD_PS = 40, IDLE_PERCENT = 10 };

struct cost {
    double hops, sent, added;
    double later;                   // part of `sent` in rounds that wait for the round before
};

static double cost_ns(const struct wire *wire, struct cost cost)
{
    const double sent = cost.sent + IDLE_PERCENT / 100.0 * cost.later;
    return wire_hop_ns(wire) * cost.hops + (wire_byte_ps(wire) * sent + ADD_PS * cost.added) / 1000.0;
}

static enum allreduce_path cheapest_over_links(int n, size_t nbytes, const struct wire *wire)
{
    int p = 1, rounds = 0;
    for (; 2 * p <= n; p *= 2)
        rounds++;
    const int folds = p < n, steps = 2 * (n - 1);
    const double N = (double)nbytes, part = 1.0 * (p - 1) / p, chunk = N / n, segment = chunk < SCHEDULE_SEGMENT ? chunk : SCHEDULE_SEGMENT;
    struct cost doubling = {.hops = rounds + 2 * folds, .sent = (rounds + 2 * folds) * N, .added = (rounds + folds) * N};
    struct cost halving = {.hops = 2 * rounds + 2 * folds, .sent = (2 * part + 2 * folds) * N, .added = (part + folds) * N};
    doubling.later = doubling.sent - N;
    halving.later = halving.sent - (folds ? N : N / 2);
    // The ring adds while the wire is busy. Long chunks hide the hops, since a segment is forwarded at once.
    const double wire_bound = cost_ns(wire, (struct cost){.hops = 1, .sent = steps * chunk});
    const double hop_bound = cost_ns(wire, (struct cost){.hops = steps, .sent = steps * segment});
    const double ring = wire_bound > hop_bound ? wire_bound : hop_bound;
    const double by_doubling = cost_ns(wire, doubling), by_halving = cost_ns(wire, halving);
    const enum allreduce_path best = by_doubling <= by_halving ? ALLREDUCE_DOUBLING : ALLREDUCE_HALVING;
    return (by_doubling <= by_halving ? by_doubling : by_halving) <= ring ? best : ALLREDUCE_RING;
}

void allreduce_schedule(struct schedule *schedule, enum allreduce_path path, const struct wire *wire, size_t nbytes, size_t element)
{
    if (!allreduce_is_over_links(path))
        path = cheapest_over_links(schedule->size, nbytes, wire);
    if (path == ALLREDUCE_DOUBLING)
        schedule_allreduce_doubling(schedule, nbytes, element);
    else if (path == ALLREDUCE_HALVING)
        schedule_allreduce_halving(schedule, nbytes, element);
    else
        schedule_allreduce_ring(schedule, nbytes, element);
}

void allreduce_plan(struct plan *plan, const struct executor *exec, const struct group *group, const struct reduction *reduction,
                    const struct span_list *list)
{
    allreduce_schedule(plan_begin(plan, group), exec->allreduce_path, &exec->wire, list->nbytes, bhvd_dtype_size(reduction->dtype));
    plan->operands = (struct operands){.reduction = *reduction, .list = list};
}
