#include "executor/pause.h"

#include <poll.h>
#include <sched.h>
#include <unistd.h>

#include "base/clock.h"
#include "executor/tasks.h"

enum {
    SPIN_ROUNDS = 100,                  // a few us: enough for a message from a rank that is running
    SPIN_ROUNDS_OVERSUBSCRIBED = 20,    // more ranks than cores: the awaited rank may need this core
    YIELD_ROUNDS = 1000,                // a rank of this host may share this core although others are free: yield it repeatedly
                                        // for up to half a millisecond before paying for a sleep and a wake-up
    POLL_AGAIN_NS = 100000              // MPI and GPUs have no descriptor to sleep on
};

static int core_count(void)
{
    cpu_set_t set;      // fails if the kernel supports more than 1,024 CPUs
    return sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : (int)sysconf(_SC_NPROCESSORS_ONLN);
}

void pause_init(struct executor *exec)
{
    exec->spin_limit = exec->connections.local_size <= core_count() ? SPIN_ROUNDS : SPIN_ROUNDS_OVERSUBSCRIBED;
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

// No yields while this process computes: each would give a whole time slice to its own computation while the peer waits. A thread
// that sleeps gets the core back at once.
bool pause_sleeps(struct executor *exec, int rounds)
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
    if (pause_sleeps(exec, *rounds))
        *rounds = engine_sleep(exec, deadline_ns, ready, arg) ? 0 : *rounds;
    else if (*rounds < exec->spin_limit)
        pause_processor();
    else
        yield(exec, *rounds);
}
