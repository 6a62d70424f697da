// The simulator over allreduces between hosts, agreed on before if asked for.
#include <stdlib.h>

#include "base/status.h"
#include "collective/collective.h"
#include "collective/schedules.h"
#include "core/carried.h"
#include "core/tree.h"
#include "core/window.h"
#include "run/simulator.h"

enum { AGREEING_NBYTES = 32 };      // about what known names take as a control frame

struct allreduces {
    enum allreduce_path path;
    const size_t *nbytes;
    size_t element;
    uint32_t hop_ns;
    bool agrees;                // execution 0 is that
};

// In a star or, about as core/tree.c makes it, a tree. Requests to the parent when the children's are there, answers to
// the children.
static void agree(struct schedule *schedule)
{
    const int n = schedule->size, fanout = n > TREE_STAR_RANKS ? TREE_FANOUT : n, rank = schedule->rank;
    const int64_t first = (int64_t)fanout * rank + 1;
    const struct place place = in_space(IN_SCRATCH, 0);
    int done = STEP_NONE;
    for (int64_t child = first; child < first + fanout && child < n; child++)
        done = schedule_both(schedule, done, schedule_receive(schedule, (int)child, place, AGREEING_NBYTES, STEP_NONE));
    if (rank) {
        const int parent = (rank - 1) / fanout;
        done = schedule_send(schedule, parent, place, AGREEING_NBYTES, done);
        done = schedule_receive(schedule, parent, place, AGREEING_NBYTES, done);
    }
    for (int64_t child = first; child < first + fanout && child < n; child++)
        schedule_send(schedule, (int)child, place, AGREEING_NBYTES, done);
}

// It has come with the answer.
static bool is_carried(const struct allreduces *allreduces, int size, size_t nbytes)
{
    return allreduces->agrees && allreduces->path == ALLREDUCE_CHOSEN && size <= TREE_STAR_RANKS && nbytes <= CARRIED_BYTES;
}

static void write_down(const void *arg, int execution, struct schedule *schedule)
{
    const struct allreduces *allreduces = arg;
    if (allreduces->agrees && execution-- == 0) {
        agree(schedule);
        return;
    }
    const size_t nbytes = allreduces->nbytes[execution];
    if (!is_carried(allreduces, schedule->size, nbytes))
        allreduce_schedule(schedule, allreduces->path, allreduces->hop_ns, nbytes, allreduces->element);
}

static int window(const void *arg, int execution)
{
    const struct allreduces *allreduces = arg;
    const int first = allreduces->agrees;
    size_t newest_first[LINK_LANES] = {0};
    int count = 0;
    for (; count < LINK_LANES && execution - count >= first; count++)
        newest_first[count] = allreduces->nbytes[execution - count - first];
    return count ? window_of(newest_first, count) : 1;
}

bhvd_status bhvd_simulate_allreduces(int size, const char *path, const size_t *nbytes, size_t count, size_t element,
                                     int agrees, const struct bhvd_network *network, double *seconds,
                                     struct bhvd_error *error)
{
    struct allreduces allreduces = {.nbytes = nbytes, .element = element, .agrees = agrees != 0};
    bhvd_status status = allreduce_path_parse(path, &allreduces.path, error);
    if (status)
        return status;
    if (allreduces.path == ALLREDUCE_SHARED || allreduces.path == ALLREDUCE_HIERARCHICAL)
        return error_set(error, BHVD_ERR_ARGUMENT, "%s is no path between hosts with one rank each", path);
    if (size < 2 || element == 0 || count > (size_t)INT32_MAX - 1 || !(network->latency_s >= 0) ||
        !(network->bytes_per_s > 0) ||
        (network->slow_rank >= 0 && (!(network->slow_latency_s >= 0) || !(network->slow_bytes_per_s > 0))))
        return error_set(error, BHVD_ERR_ARGUMENT, "a simulation takes at least two hosts, elements of at least a byte, "
                         "latencies of at least 0 and lines of more than 0 bytes a second");
    for (size_t i = 0; i < count; i++)
        if (nbytes[i] % element)
            return error_set(error, BHVD_ERR_ARGUMENT, "%zu bytes are no elements of %zu", nbytes[i], element);
    const double hop_ns = network->latency_s * 1e9;
    allreduces.hop_ns = hop_ns < UINT32_MAX ? (uint32_t)hop_ns : UINT32_MAX;
    const struct simulated simulated = {size, (int)count + allreduces.agrees, write_down, window, &allreduces};
    status = simulate(&simulated, network, seconds);
    if (status == BHVD_ERR_UNSUPPORTED)
        return error_set(error, status, "%d hosts do more than %d steps on this path: take fewer hosts or another path", size,
                         SIMULATOR_STEPS_MAX);
    return status ? error_set(error, status, status == BHVD_ERR_SYSTEM ? "no memory for the steps of %d hosts"
                                                                       : "some of %d hosts waits for ever", size) : BHVD_OK;
}
