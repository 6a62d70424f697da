#include "run/pause.h"

#include <poll.h>
#include <sched.h>
#include <unistd.h>

#include "base/clock.h"

enum {
    SPIN_ROUNDS = 100,                  // a few us: enough for a message from a rank that is running
    SPIN_ROUNDS_OVERSUBSCRIBED = 20,    // more ranks than cores: the awaited rank may need this core
    YIELD_ROUNDS = 1000,                // a rank of this host may share this core although others are free: yield it repeatedly
                                        // for up to half a millisecond before paying for a sleep and a wake-up
    LOOK_AGAIN_NS = 100000              // MPI and GPUs have no descriptor to sleep on
};

static int core_count(void)
{
    cpu_set_t set;      // fails if the kernel supports more than 1,024 CPUs
    return sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : (int)sysconf(_SC_NPROCESSORS_ONLN);
}

void pause_init(struct run *run)
{
    run->spin_limit = run->connections.local_size <= core_count() ? SPIN_ROUNDS : SPIN_ROUNDS_OVERSUBSCRIBED;
    run->yield_limit = run->connections.local_size > 1 ? YIELD_ROUNDS : 0;
}

void pause_processor(void)
{
#if defined __x86_64__
    __builtin_ia32_pause();
#elif defined __aarch64__
    __asm__ volatile("yield");
#endif
}

void pause_set_doorbell(struct run *run, enum doorbell_state state)
{
    atomic_store(&run->connections.doorbell.word->state, state);
}

void pause_in_poll(const struct connections *c, bool links_too, int timeout_ms, bool looking)
{
    struct pollfd fds[] = {{.fd = c->doorbell.fd, .events = POLLIN}, {.fd = links_too ? c->poller.fd : -1, .events = POLLIN}};
    struct timespec timeout = {timeout_ms / 1000, timeout_ms % 1000 * 1000000L};
    if (looking && timeout_ms > 0)
        timeout = (struct timespec){0, LOOK_AGAIN_NS};
    ppoll(fds, sizeof fds / sizeof fds[0], &timeout, NULL);
}

static bool computes(struct run *run) { return !atomic_load_explicit(&run->waiting, memory_order_relaxed); }

bool pause_blocks(struct run *run) { return computes(run) && run->connections.local_size == 1; }

// Waits for an event; ready: the caller's condition, checked once more after the doorbell is set; NULL: none.
// True if something moved.
static bool engine_sleep(struct run *run, int64_t deadline_ns, run_ready_fn ready, void *arg)
{
    pause_set_doorbell(run, DOORBELL_ASLEEP);
    bool progress = run->callbacks->poll(run->owner, true);
    const bool may_sleep = (!progress || pause_blocks(run)) && !run->connections.poller.ready_links.head;
    if (may_sleep && !run->failure.status && !(ready && ready(run, arg))) {
        int timeout = clock_remaining_ms(deadline_ns);
        if (timeout < 0 || timeout > run->sleep_ms)
            timeout = run->sleep_ms;
        pause_in_poll(&run->connections, true, timeout, run->callbacks->needs_poll(run->owner));
        doorbell_drain(&run->connections.doorbell);
        run_look_at_liveness(run);
        progress = run->callbacks->poll(run->owner, true);   // messages that arrived while this process was stopped are in time
        run->callbacks->check_timers(run->owner);
    }
    pause_set_doorbell(run, DOORBELL_AWAKE);
    return progress;
}

// No yields while this process computes: each would give a whole time slice to its own computation while the peer waits. A thread
// that sleeps gets the core back at once.
bool pause_sleeps(struct run *run, int rounds)
{
    return pause_blocks(run) || rounds >= run->spin_limit + (computes(run) ? 0 : run->yield_limit);
}

// On an oversubscribed machine each yield may take a time slice of every other program, so the clock and the peers' liveness must
// be checked in this loop too, just after the sockets.
static void yield(struct run *run, int rounds)
{
    sched_yield();
    if (rounds % SOCKET_ROUNDS == 1) {
        run_look_at_liveness(run);
        run->callbacks->keep_alive(run->owner);
    }
}

void pause_engine(struct run *run, int *rounds, int64_t deadline_ns, run_ready_fn ready, void *arg)
{
    ++*rounds;
    if (pause_sleeps(run, *rounds))
        *rounds = engine_sleep(run, deadline_ns, ready, arg) ? 0 : *rounds;
    else if (*rounds < run->spin_limit)
        pause_processor();
    else
        yield(run, *rounds);
}
