// Selects the allreduce over links: the cheapest, or the requested one.
#include "base/status.h"
#include "collective/collectives.h"
#include "collective/schedules.h"

static const char *const PATH_NAMES[] = {"", "ring", "doubling", "halving"};

bhvd_status allreduce_path_parse(const char *name, enum allreduce_path *path, struct bhvd_error *error)
{
    for (int i = ALLREDUCE_CHOSEN; i <= ALLREDUCE_HALVING; i++) {
        *path = (enum allreduce_path)i;
        if (strcmp(name ? name : "", PATH_NAMES[i]) == 0)
            return BHVD_OK;
    }
    return error_set(error, BHVD_ERR_ARGUMENT, "unknown allreduce path \"%s\"; known are %s, %s, %s", name, PATH_NAMES[1],
                     PATH_NAMES[2], PATH_NAMES[3]);
}

// Cost of an allreduce between hosts, in nanoseconds: alpha (latency) for each message that waits for the one before, beta for
// each byte sent, gamma for each byte added. Alpha and beta are measured when ranks connect; alpha is at least the ranks' own
// overhead. For gamma see `python -m tests.laboratory --hosts` and docs/performance.md.
// The wire idles at the start of each round that waits for the whole previous round: hosts have different delays, and another
// connection has to speed up. Only the ratios matter, and these only slightly.
enum { GAMMA_PS = 40, IDLE_PERCENT = 10 };

struct cost {
    double alphas, sent, added;
    double serialized;              // bytes of `sent` in rounds that wait for the round before
};

static double cost_ns(const struct network_cost *network, struct cost cost)
{
    const double sent = cost.sent + IDLE_PERCENT / 100.0 * cost.serialized;
    return network_alpha_ns(network) * cost.alphas + (network_beta_ps(network) * sent + GAMMA_PS * cost.added) / 1000.0;
}

static enum allreduce_path cheapest_over_links(int n, size_t nbytes, const struct network_cost *network)
{
    int p = 1, rounds = 0;
    for (; 2 * p <= n; p *= 2)
        rounds++;
    const int folds = p < n, steps = 2 * (n - 1);
    const double N = (double)nbytes, part = 1.0 * (p - 1) / p, chunk = N / n;
    const double segment = chunk < SCHEDULE_SEGMENT ? chunk : SCHEDULE_SEGMENT;
    struct cost doubling = {.alphas = rounds + 2 * folds, .sent = (rounds + 2 * folds) * N, .added = (rounds + folds) * N};
    struct cost halving = {.alphas = 2 * rounds + 2 * folds, .sent = (2 * part + 2 * folds) * N, .added = (part + folds) * N};
    doubling.serialized = doubling.sent - N;
    halving.serialized = halving.sent - (folds ? N : N / 2);
    // The ring adds while the wire is busy. Long chunks hide the latency, since a segment is forwarded at once.
    const double bandwidth_bound = cost_ns(network, (struct cost){.alphas = 1, .sent = steps * chunk});
    const double latency_bound = cost_ns(network, (struct cost){.alphas = steps, .sent = steps * segment});
    const double ring = bandwidth_bound > latency_bound ? bandwidth_bound : latency_bound;
    const double by_doubling = cost_ns(network, doubling), by_halving = cost_ns(network, halving);
    const enum allreduce_path best = by_doubling <= by_halving ? ALLREDUCE_DOUBLING : ALLREDUCE_HALVING;
    return (by_doubling <= by_halving ? by_doubling : by_halving) <= ring ? best : ALLREDUCE_RING;
}

void allreduce_schedule(struct schedule *schedule, enum allreduce_path path, const struct network_cost *network, size_t nbytes,
                        size_t element)
{
    if (path == ALLREDUCE_CHOSEN)
        path = cheapest_over_links(schedule->size, nbytes, network);
    if (path == ALLREDUCE_DOUBLING)
        schedule_allreduce_doubling(schedule, nbytes);
    else if (path == ALLREDUCE_HALVING)
        schedule_allreduce_halving(schedule, nbytes, element);
    else
        schedule_allreduce_ring(schedule, nbytes, element);
}

void allreduce_plan(struct plan *plan, const struct executor *exec, const struct group *group, const struct reduction *reduction,
                    const struct span_list *list)
{
    allreduce_schedule(plan_begin(plan, group), exec->allreduce_path, &exec->network, list->nbytes,
                       bhvd_dtype_size(reduction->dtype));
    plan->operands = (struct operands){.reduction = *reduction, .list = list};
}
