#include "executor/wait.h"

#include <poll.h>
#include <sched.h>
#include <stdio.h>
#include <unistd.h>

#include "base/clock.h"
#include "executor/task.h"

enum {
    SPIN_ROUNDS = 100,                  // a few us: enough for a message from a rank that is running
    SPIN_ROUNDS_OVERSUBSCRIBED = 20,    // more ranks than cores: the awaited rank may need this core
    YIELD_ROUNDS = 1000,                // a rank of this host may share this core although others are free: yield it repeatedly
                                        // for up to half a millisecond before paying for a sleep and a wake-up
    POLL_AGAIN_NS = 100000              // MPI and GPUs have no descriptor to sleep on
};

void pause_init(struct executor *exec)
{
    cpu_set_t set;      // fails if the kernel supports more than 1,024 CPUs
    const int cores = sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : (int)sysconf(_SC_NPROCESSORS_ONLN);
    exec->spin_limit = exec->connections.local_size <= cores ? SPIN_ROUNDS : SPIN_ROUNDS_OVERSUBSCRIBED;
    exec->yield_limit = exec->connections.local_size > 1 ? YIELD_ROUNDS : 0;
}

void pause_processor(void)
{
#if defined __x86_64__
    __builtin_ia32_pause();
#elif defined __aarch64__
    __asm__ volatile("yield");
#endif
}

void pause_set_doorbell(struct executor *exec, enum doorbell_state state)
{
    atomic_store(&exec->connections.doorbell.word->state, state);
}

void pause_in_poll(const struct connections *c, bool links_too, int timeout_ms, bool must_poll)
{
    struct pollfd fds[] = {{.fd = c->doorbell.fd, .events = POLLIN}, {.fd = links_too ? c->poller.fd : -1, .events = POLLIN}};
    struct timespec timeout = {timeout_ms / 1000, timeout_ms % 1000 * 1000000L};
    if (must_poll && timeout_ms > 0)
        timeout = (struct timespec){0, POLL_AGAIN_NS};
    ppoll(fds, sizeof fds / sizeof fds[0], &timeout, NULL);
}

static bool computes(struct executor *exec) { return !atomic_load_explicit(&exec->waiting, memory_order_relaxed); }

bool pause_blocks(struct executor *exec) { return computes(exec) && exec->connections.local_size == 1; }

// Waits for an event; ready: the caller's condition, checked once more after the doorbell is set; NULL: none.
// True if something moved.
static bool engine_sleep(struct executor *exec, int64_t deadline_ns, executor_ready_fn ready, void *arg)
{
    pause_set_doorbell(exec, DOORBELL_ASLEEP);
    bool progress = exec->callbacks->poll(exec->ctx, true);
    const bool is_done = !progress || (pause_blocks(exec) && !tasks_can_advance(exec));
    const bool may_sleep = is_done && !exec->connections.poller.active_links.head;
    if (may_sleep && !exec->failure.status && !(ready && ready(exec, arg))) {
        int timeout = clock_remaining_ms(deadline_ns);
        if (timeout < 0 || timeout > exec->sleep_ms)
            timeout = exec->sleep_ms;
        pause_in_poll(&exec->connections, true, timeout, exec->callbacks->needs_poll(exec->ctx));
        doorbell_drain(&exec->connections.doorbell);
        executor_check_liveness(exec);
        progress = exec->callbacks->poll(exec->ctx, true);    // messages that arrived while this process was stopped are in time
        exec->callbacks->check_timers(exec->ctx);
    }
    pause_set_doorbell(exec, DOORBELL_AWAKE);
    return progress;
}

// Is the pause after this many rounds a sleep? No yields while this process computes: each would give a whole time slice to its own computation while the peer waits. A thread
// that sleeps gets the core back at once.
static bool sleeps(struct executor *exec, int rounds)
{
    return pause_blocks(exec) || rounds >= exec->spin_limit + (computes(exec) ? 0 : exec->yield_limit);
}

// On an oversubscribed machine each yield may take a time slice of every other program, so the clock and the peers' liveness must
// be checked in this loop too, just after the sockets.
static void yield(struct executor *exec, int rounds)
{
    sched_yield();
    if (rounds % SOCKET_ROUNDS == 1) {
        executor_check_liveness(exec);
        exec->callbacks->keep_alive(exec->ctx);
    }
}

void pause_engine(struct executor *exec, int *rounds, int64_t deadline_ns, executor_ready_fn ready, void *arg)
{
    ++*rounds;
    if (sleeps(exec, *rounds))
        *rounds = engine_sleep(exec, deadline_ns, ready, arg) ? 0 : *rounds;
    else if (*rounds < exec->spin_limit)
        pause_processor();
    else
        yield(exec, *rounds);
}

// ----------------------------------------------------------------------------------------- waiting inside an execution

enum { WAITS_PER_POLL = 64 };   // of waits that were ready at once

static int64_t timeout_ns(const struct executor *exec) { return clock_ms_ns(exec->timeout_ms); }

int64_t executor_gpu_timeout_ns(const struct executor *exec) { return GPU_TIMEOUTS * timeout_ns(exec); }

// Changes when a rank of this host has moved data over a socket.
static uint32_t host_activity(const struct executor *exec)
{
    uint32_t sum = 0;
    for (int i = 0; i < exec->connections.shm.ranks; i++)
        sum += atomic_load_explicit(&shm_segment_doorbell(&exec->connections.shm, i)->activity, memory_order_relaxed);
    return sum;
}

// Did the limit expire? Heartbeats and frames of other operations do not count as progress.
static bool progress_timer_expired(struct executor *exec, struct progress_timer *timer, int64_t limit_ns)
{
    uint64_t moved = exec->moved + host_activity(exec);
    int64_t now_ns = clock_now_ns();
    bool begins = !timer->since_ns || moved != timer->moved || exec->returned_ns > timer->since_ns;
    if (begins || (now_ns >= timer->since_ns + limit_ns && exec->callbacks->others_are_earlier(exec->ctx)))
        *timer = (struct progress_timer){now_ns, moved};
    return now_ns >= timer->since_ns + limit_ns;
}

// Before every sleep, and regularly whatever moves: heartbeats and frames of other operations may arrive without
// end, each before the last sleep is over.
static bool checks_clock(struct executor *exec, int rounds, uint32_t polls)
{
    return sleeps(exec, rounds + 1) || polls % POLLS_PER_CHECK == 0 ||
           (rounds >= exec->spin_limit && rounds % SOCKET_ROUNDS == 0);
}

// Formats the ranks whose messages are missing, or the awaited one, for the error. Returns that rank; -1: several, or unknown.
static int name_awaited(const struct executor *exec, int waiting_for, char *out, size_t size)
{
    size_t used = 0;
    int awaited = 0, last = -1;
    for (int rank = 0; rank < exec->connections.size; rank++) {
        const struct link *link = &exec->connections.links[rank];
        const bool is_awaited = traffic_is_pending(&link->receives) || traffic_is_pending(&link->sends);
        if (!(waiting_for < 0 ? is_awaited && rank != exec->connections.rank : rank == waiting_for))
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

static bhvd_status fail_timeout(struct executor *exec, int waiting_for)
{
    char who[128];
    const int rank = name_awaited(exec, waiting_for, who, sizeof who);
    return executor_blame(exec, BHVD_ERR_TIMEOUT, BHVD_CAUSE_TIMEOUT, rank,
                          "no progress for %.1f s inside an operation while waiting for %s; the limit is set by "
                          "HOROVOD_GLOO_TIMEOUT_SECONDS", exec->timeout_ms / 1000.0, who);
}

static bhvd_status fail_gpu_timeout(struct executor *exec)
{
    return executor_fail(exec, BHVD_ERR_TIMEOUT, "rank %d: the GPU has not finished for %.1f s; the limit is %d times "
                         "HOROVOD_GLOO_TIMEOUT_SECONDS", exec->connections.rank,
                         (double)executor_gpu_timeout_ns(exec) / 1e9, GPU_TIMEOUTS);
}

// Waits an eighth longer for a rank of this host, which may itself wait for another host and then reports that first.
void executor_check_progress(struct executor *exec)
{
    const int local = tasks_awaited_rank(exec);
    const int64_t limit_ns = timeout_ns(exec);
    if (!tasks_are_running(exec))
        exec->timer = (struct progress_timer){0};
    else if (!exec->failure.status && progress_timer_expired(exec, &exec->timer, local < 0 ? limit_ns : limit_ns + limit_ns / 8))
        fail_timeout(exec, local);
}

bhvd_status executor_wait(struct executor *exec, executor_ready_fn ready, void *arg, int waiting_for)
{
    int rounds = 0;
    struct progress_timer timer = {0};
    const int64_t limit_ns = exec->waits_for_gpu ? executor_gpu_timeout_ns(exec) : timeout_ns(exec);
    for (uint32_t polls = 1;; polls++) {
        int is_ready = ready(exec, arg);
        if (is_ready > 0) {
            // A rank that never waits, because it is always last, must still send heartbeats.
            if (rounds == 0 && ++exec->waits_for_nothing % WAITS_PER_POLL == 0) {
                exec->callbacks->poll(exec->ctx, true);
                exec->callbacks->keep_alive(exec->ctx);
            }
            return BHVD_OK;
        }
        if (exec->failure.status)
            return exec->failure.status;
        bool moved = exec->callbacks->poll(exec->ctx, rounds % SOCKET_ROUNDS == 0);
        if (moved)
            rounds = 0;
        if (checks_clock(exec, rounds, polls) && progress_timer_expired(exec, &timer, limit_ns) && ready(exec, arg) <= 0) {
            return exec->waits_for_gpu ? fail_gpu_timeout(exec) : fail_timeout(exec, waiting_for);
        }
        if (!moved || (pause_blocks(exec) && !ready(exec, arg)))
            pause_engine(exec, &rounds, timer.since_ns ? timer.since_ns + limit_ns : CLOCK_NEVER, ready, arg);
    }
}

bhvd_status executor_wait_gpu(struct executor *exec, executor_ready_fn ready, void *arg)
{
    exec->waits_for_gpu = true;
    bhvd_status status = executor_wait(exec, ready, arg, -1);
    exec->waits_for_gpu = false;
    return status;
}
