// Waiting inside an execution.
#include <stdio.h>

#include "base/clock.h"
#include "run/plan.h"
#include "run/pause.h"

enum { WAITS_PER_POLL = 64 };   // of waits that were ready at once

static int64_t timeout_ns(const struct run *run) { return clock_ms_ns(run->timeout_ms); }

int64_t run_gpu_timeout_ns(const struct run *run) { return GPU_TIMEOUTS * timeout_ns(run); }

// Changes when a rank of this host has moved data over a socket.
static uint32_t host_activity(const struct run *run)
{
    uint32_t sum = 0;
    for (int i = 0; i < run->connections.host.ranks; i++)
        sum += atomic_load_explicit(&host_memory_doorbell(&run->connections.host, i)->activity, memory_order_relaxed);
    return sum;
}

// Did the limit expire? Heartbeats and frames of other operations do not count as progress.
static bool no_progress_is_over_limit(struct run *run, struct no_progress *still, int64_t limit_ns)
{
    uint64_t moved = run->messages_moved + host_activity(run);
    int64_t now_ns = clock_now_ns();
    bool begins = !still->since_ns || moved != still->moved || run->returned_ns > still->since_ns;
    if (begins || (now_ns >= still->since_ns + limit_ns && run->callbacks->others_are_earlier(run->owner)))
        *still = (struct no_progress){now_ns, moved};
    return now_ns >= still->since_ns + limit_ns;
}

// Before every sleep, and regularly whatever moves: heartbeats and frames of other operations may arrive without
// end, each before the last sleep is over.
static bool looks_at_clock(struct run *run, int rounds, uint32_t polls)
{
    return pause_sleeps(run, rounds + 1) || polls % POLLS_PER_LOOK == 0 ||
           (rounds >= run->spin_limit && rounds % SOCKET_ROUNDS == 0);
}

// Writes the ranks whose messages are missing, or the awaited one. Returns it; -1: several, or unknown.
static int name_awaited(const struct run *run, int waiting_for, char *out, size_t size)
{
    size_t used = 0;
    int awaited = 0, last = -1;
    for (int rank = 0; rank < run->connections.size; rank++) {
        const struct link *link = &run->connections.links[rank];
        bool due = rank != run->connections.rank && (traffic_is_pending(&link->receives) || traffic_is_pending(&link->sends));
        if (!(waiting_for < 0 ? due : rank == waiting_for))
            continue;
        awaited++;
        last = rank;
        if (used < size)
            used += (size_t)snprintf(out + used, size - used, "%s%d", used ? ", " : "rank ", rank);
    }
    if (!awaited)
        snprintf(out, size, "another rank");
    return awaited == 1 ? last : -1;
}

static bhvd_status fail_still(struct run *run, int waiting_for)
{
    char who[128];
    if (run->waits_for_gpu)
        return run_fail(run, BHVD_ERR_TIMEOUT, "rank %d: the GPU has not finished for %.1f s; the limit is %d times "
                        "HOROVOD_GLOO_TIMEOUT_SECONDS", run->connections.rank, (double)run_gpu_timeout_ns(run) / 1e9, GPU_TIMEOUTS);
    const int rank = name_awaited(run, waiting_for, who, sizeof who);
    return run_blame(run, BHVD_ERR_TIMEOUT, BHVD_CAUSE_TIMEOUT, rank,
                     "no progress for %.1f s inside an operation while waiting for %s; the limit is set by "
                     "HOROVOD_GLOO_TIMEOUT_SECONDS", run->timeout_ms / 1000.0, who);
}

void run_look_at_schedules(struct run *run)
{
    if (!executor_is_busy(run))
        run->executor.still = (struct no_progress){0};
    else if (!run->failure.status && no_progress_is_over_limit(run, &run->executor.still, timeout_ns(run)))
        fail_still(run, executor_awaited(run));
}

bhvd_status run_until(struct run *run, run_ready_fn ready, void *arg, int waiting_for)
{
    int rounds = 0;
    struct no_progress still = {0};
    const int64_t limit_ns = run->waits_for_gpu ? run_gpu_timeout_ns(run) : timeout_ns(run);
    for (uint32_t polls = 1;; polls++) {
        int is_ready = ready(run, arg);
        if (is_ready > 0) {
            // A rank that never waits, because it is always last, must still send heartbeats.
            if (rounds == 0 && ++run->waits_for_nothing % WAITS_PER_POLL == 0) {
                run->callbacks->poll(run->owner, true);
                run->callbacks->keep_alive(run->owner);
            }
            return BHVD_OK;
        }
        if (run->failure.status)
            return run->failure.status;
        bool moved = run->callbacks->poll(run->owner, rounds % SOCKET_ROUNDS == 0);
        if (moved)
            rounds = 0;
        if (looks_at_clock(run, rounds, polls) && no_progress_is_over_limit(run, &still, limit_ns) && ready(run, arg) <= 0) {
            return fail_still(run, waiting_for);
        }
        if (!moved || (pause_blocks(run) && !ready(run, arg)))
            pause_engine(run, &rounds, still.since_ns ? still.since_ns + limit_ns : CLOCK_NEVER, ready, arg);
    }
}

bhvd_status run_until_gpu(struct run *run, run_ready_fn ready, void *arg)
{
    run->waits_for_gpu = true;
    bhvd_status status = run_until(run, ready, arg, -1);
    run->waits_for_gpu = false;
    return status;
}
