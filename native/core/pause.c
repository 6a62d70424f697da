#include "core/pause.h"

#include <poll.h>
#include <sched.h>
#include <stdlib.h>

#include "base/clock.h"
#include "base/status.h"
#include "core/engine.h"

enum {
    SPIN_ROUNDS = 100,          // a few us: a message from a rank that is running comes within that
    SPIN_ROUNDS_CROWDED = 20,   // more ranks than cores: the one that is waited for needs this core
    YIELD_ROUNDS = 1000,        // a rank of this host may share this core although there are others: give it away, again
                                // and again, for up to half a millisecond, before paying for a sleep and a wake-up
    LOOK_AGAIN_NS = 100000      // MPI and GPUs have no descriptor to sleep on
};

static int core_count(void)
{
    cpu_set_t set;
    return sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
}

bool pause_init(bhvd_context *ctx)
{
    ctx->spin_limit = ctx->connections.local_size <= core_count() ? SPIN_ROUNDS : SPIN_ROUNDS_CROWDED;
    ctx->yield_limit = ctx->connections.local_size > 1 ? YIELD_ROUNDS : 0;
    ctx->poll_fds = pause_fds_create(ctx);
    return ctx->poll_fds;
}

// The bell; of each peer a liveness socket, or a control channel and streams.
struct pollfd *pause_fds_create(const bhvd_context *ctx)
{
    return malloc((1 + (1 + LINK_STREAMS_MAX) * (size_t)ctx->options.size) * sizeof(struct pollfd));
}

int pause_fill_fds(bhvd_context *ctx, struct pollfd *fds)
{
    int count = 0;
    fds[count++] = (struct pollfd){.fd = ctx->connections.bell.fd, .events = POLLIN};
    // After a failure nobody reads the sockets any more.
    for (int rank = 0; rank < ctx->options.size && !ctx->failure.status; rank++) {
        const struct link *link = &ctx->connections.links[rank];
        if (rank == ctx->options.rank || link->state != LINK_OPEN)
            continue;
        if (link->liveness_fd >= 0)
            fds[count++] = (struct pollfd){.fd = link->liveness_fd, .events = POLLIN | POLLRDHUP};
        if (link->control.fd >= 0)
            fds[count++] = (struct pollfd){.fd = link->control.fd,
                                           .events = POLLIN | (link->control_out.size ? POLLOUT : 0)};
        for (int i = 0; i < link->stream_count && link->streams[i].channel.fd >= 0; i++) {
            const struct stream *stream = &link->streams[i];
            fds[count++] = (struct pollfd){.fd = stream->channel.fd,
                                           .events = (stream->receives.head ? POLLIN : 0) |
                                                     (stream->sends.head ? POLLOUT : 0)};
        }
    }
    return count;
}

void pause_processor(void)
{
#if defined __x86_64__
    __builtin_ia32_pause();
#elif defined __aarch64__
    __asm__ volatile("yield");
#endif
}

void pause_set_bell(bhvd_context *ctx, enum bell_state state)
{
    atomic_store(&ctx->connections.bell.word->state, state);
}

enum bell_state pause_bell_asleep(bhvd_context *ctx)
{
    bool waits = atomic_load(&ctx->outstanding) != 0;
    for (int rank = 0; rank < ctx->options.size && !waits; rank++)
        waits = ctx->connections.links[rank].control_out.size != 0;     // for room in a ring
    return waits ? BELL_ASLEEP : BELL_IDLE;
}

void pause_in_poll(struct pollfd *fds, int count, int timeout_ms, bool looking)
{
    struct timespec timeout = {timeout_ms / 1000, timeout_ms % 1000 * 1000000L};
    if (looking && timeout_ms > 0)
        timeout = (struct timespec){0, LOOK_AGAIN_NS};
    ppoll(fds, (nfds_t)count, &timeout, NULL);
}

static bool computes(bhvd_context *ctx) { return !atomic_load_explicit(&ctx->waiting, memory_order_relaxed); }

bool pause_is_patient(bhvd_context *ctx) { return computes(ctx) && ctx->connections.local_size == 1; }

// Waits for an event; ready: what the caller waits for, looked at once more after the bell is set. NULL: nothing.
// True when something moved.
static bool engine_sleep(bhvd_context *ctx, int64_t deadline_ns, progress_ready_fn ready, void *arg)
{
    pause_set_bell(ctx, BELL_ASLEEP);
    bool progress = engine_poll(ctx, true);
    if ((!progress || pause_is_patient(ctx)) && !ctx->failure.status && !(ready && ready(ctx, arg))) {
        int timeout = clock_remaining_ms(deadline_ns);
        if (timeout < 0 || timeout > ctx->heartbeat.interval_ms)
            timeout = ctx->heartbeat.interval_ms;
        pause_in_poll(ctx->poll_fds, pause_fill_fds(ctx, ctx->poll_fds), timeout, engine_needs_looking(ctx));
        bell_drain(&ctx->connections.bell);
        engine_look_at_liveness(ctx);
        progress = engine_poll(ctx, true);      // what came while this process was stopped counts as heard in time
        engine_look_around(ctx);
    }
    pause_set_bell(ctx, BELL_AWAKE);
    return progress;
}

// No yields while this process computes: each would give a whole time slice to its own computation, and the peer waits. Who
// sleeps gets the core back at once.
bool pause_sleeps(bhvd_context *ctx, int rounds)
{
    return pause_is_patient(ctx) || rounds >= ctx->spin_limit + (computes(ctx) ? 0 : ctx->yield_limit);
}

// On a crowded machine each yield may take a time slice of every other program: the clock, and who has died, must be looked at
// meanwhile, just after the sockets.
static void yield(bhvd_context *ctx, int rounds)
{
    sched_yield();
    if (rounds % SOCKET_ROUNDS == 1) {
        engine_look_at_liveness(ctx);
        heartbeat_look(ctx, true);
    }
}

void pause_engine(bhvd_context *ctx, int *rounds, int64_t deadline_ns, progress_ready_fn ready, void *arg)
{
    ++*rounds;
    if (pause_sleeps(ctx, *rounds))
        *rounds = engine_sleep(ctx, deadline_ns, ready, arg) ? 0 : *rounds;
    else if (*rounds < ctx->spin_limit)
        pause_processor();
    else
        yield(ctx, *rounds);
}
