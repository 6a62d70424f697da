#include "core/progress.h"

#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/futex.h"
#include "base/status.h"
#include "collective/nccl.h"
#include "core/engine.h"
#include "core/pause.h"
#include "transport/channel_mpi.h"

enum {
    HANDOVER_ROUNDS = 50,       // another thread runs the engine: it may be done in a moment
    IDLE_ROUNDS = 200,          // the progress thread looks a little longer before it sleeps: posts come in bursts
    POLLS_PER_LOOK = 256,       // at the clock: takes as long as a poll
    WAITS_PER_POLL = 64,        // of those for what is there already
    GOODBYE_MS = 1000,          // for the last frames to be written
    SLICE_NS = 100000           // of the progress thread; the kernel's shortest
};

static int64_t timeout_ns(const bhvd_context *ctx) { return (int64_t)ctx->options.timeout_ms * 1000000; }

// Changes when a rank of this host moved something over a socket.
static uint32_t host_activity(const bhvd_context *ctx)
{
    uint32_t sum = 0;
    for (int i = 0; i < ctx->connections.host.ranks; i++)
        sum += atomic_load_explicit(&host_memory_bell(&ctx->connections.host, i)->activity, memory_order_relaxed);
    return sum;
}

// How long nothing has moved that an operation needs.
struct stillness {
    int64_t since_ns;                   // 0: not looked at yet
    uint64_t moved;
};

// Did the limit pass? Frames that only tell of life, or of other operations, do not count as movement.
static bool stillness_is_over_limit(bhvd_context *ctx, struct stillness *still)
{
    uint64_t moved = ctx->messages_moved + host_activity(ctx);
    int64_t now_ns = clock_now_ns();
    bool begins = !still->since_ns || moved != still->moved || ctx->heartbeat.returned_ns > still->since_ns;
    if (begins || (now_ns >= still->since_ns + timeout_ns(ctx) && heartbeat_others_are_earlier(ctx)))
        *still = (struct stillness){now_ns, moved};
    return now_ns >= still->since_ns + timeout_ns(ctx);
}

// Before every sleep, and every so often however much moves: frames that tell of life or of other operations may come without
// end, each before the last sleep is over.
static bool looks_at_clock(bhvd_context *ctx, int rounds, uint32_t polls)
{
    return pause_sleeps(ctx, rounds + 1) || polls % POLLS_PER_LOOK == 0 ||
           (rounds >= ctx->spin_limit && rounds % SOCKET_ROUNDS == 0);
}

// The ranks whose messages are due, or the one that is waited for.
static void name_awaited(const bhvd_context *ctx, int waiting_for, char *out, size_t size)
{
    size_t used = 0;
    for (int rank = 0; rank < ctx->options.size; rank++) {
        const struct link *link = &ctx->connections.links[rank];
        bool due = rank != ctx->options.rank && (traffic_is_pending(&link->receives) || traffic_is_pending(&link->sends));
        if ((waiting_for < 0 ? due : rank == waiting_for) && used < size)
            used += (size_t)snprintf(out + used, size - used, "%s%d", used ? ", " : "rank ", rank);
    }
    if (!used)
        snprintf(out, size, "another rank");
}

bhvd_status progress_until(bhvd_context *ctx, progress_ready_fn ready, void *arg, int waiting_for)
{
    int rounds = 0;
    struct stillness still = {0};
    for (uint32_t polls = 1;; polls++) {
        int is_ready = ready(ctx, arg);
        if (is_ready > 0) {
            // Who never has to wait, since it is always the last to come, must still be heard by the others.
            if (rounds == 0 && ++ctx->waits_for_nothing % WAITS_PER_POLL == 0)
                progress_look(ctx);
            return BHVD_OK;
        }
        if (ctx->failure.status)
            return ctx->failure.status;
        bool moved = engine_poll(ctx, rounds % SOCKET_ROUNDS == 0);
        if (moved)
            rounds = 0;
        if (looks_at_clock(ctx, rounds, polls) && stillness_is_over_limit(ctx, &still) && ready(ctx, arg) <= 0) {
            char who[128];
            name_awaited(ctx, waiting_for, who, sizeof who);
            return context_fail(ctx, BHVD_ERR_TIMEOUT,
                                "no progress for %.1f s inside an operation while waiting for %s; the limit is set by "
                                "HOROVOD_GLOO_TIMEOUT_SECONDS", ctx->options.timeout_ms / 1000.0, who);
        }
        if (!moved || (pause_is_patient(ctx) && !ready(ctx, arg)))
            pause_engine(ctx, &rounds, still.since_ns ? still.since_ns + timeout_ns(ctx) : CLOCK_NEVER, ready, arg);
    }
}

void progress_look(bhvd_context *ctx)
{
    engine_poll(ctx, true);
    heartbeat_look(ctx, true);
}

struct transfers {
    struct transfer *transfers;
    int count, done;
};

static int transfers_done(bhvd_context *ctx, void *arg)
{
    struct transfers *t = arg;
    (void)ctx;
    while (t->done < t->count && t->transfers[t->done].done)
        t->done++;
    return t->done == t->count;
}

bhvd_status progress_transfers(bhvd_context *ctx, struct transfer *transfers, int count)
{
    struct transfers arg = {transfers, count, 0};
    return progress_until(ctx, transfers_done, &arg, -1);
}

// Must the progress thread wake for what is there now? Under engine_lock.
static bool engine_has_work(bhvd_context *ctx)
{
    if (ctx->failure.status)
        return false;
    if (atomic_load(&ctx->posted_count) || ctx->executions_head)
        return true;
    // With only the global set nothing can happen before this rank posts: leave the others' requests where they are.
    if (pause_bell_asleep(ctx) == BELL_IDLE && ctx->sets.generation <= 1)
        return false;
    for (int rank = 0; rank < ctx->options.size; rank++) {
        const struct link *link = &ctx->connections.links[rank];
        if (rank != ctx->options.rank && link_ready(link))
            return true;
    }
    return false;
}

// Linux since 6.12 takes a thread's time slice from here. With a short one the kernel lets the progress thread, when it
// wakes, in before the computation that has the core; it gets no more of the core for it. Elsewhere nothing changes.
static void ask_for_short_slice(void)
{
    struct {
        uint32_t size, policy;
        uint64_t flags;
        int32_t nice;
        uint32_t priority;
        uint64_t runtime, deadline, period;
    } attributes = {.size = sizeof attributes, .policy = SCHED_OTHER, .runtime = SLICE_NS};
    attributes.nice = getpriority(PRIO_PROCESS, 0);
    if (sched_getscheduler(0) == SCHED_OTHER)       // another policy is the user's choice
        syscall(SYS_sched_setattr, 0, &attributes, 0);
}

static void *progress_main(void *arg)
{
    bhvd_context *ctx = arg;
    struct pollfd *fds = pause_fds_create(ctx);
    ask_for_short_slice();
    while (!atomic_load(&ctx->closed) && fds) {
        pthread_mutex_lock(&ctx->engine_lock);
        pause_set_bell(ctx, BELL_AWAKE);
        // Only now, since a waiting thread may have held the engine and be asleep on the same bell: it would miss it.
        bell_drain(&ctx->connections.bell);
        for (int rounds = 0; rounds < IDLE_ROUNDS && !atomic_load(&ctx->closed); rounds++) {
            bool progress = engine_poll(ctx, rounds % SOCKET_ROUNDS == 0);
            while (ctx->executions_head && !ctx->failure.status) {
                engine_execute_next(ctx);
                progress = true;
            }
            if (progress)
                rounds = 0;
            else if (atomic_load(&ctx->outstanding) == 0)
                break;
            else
                pause_processor();
        }
        engine_look_at_liveness(ctx);
        engine_look_around(ctx);
        pause_set_bell(ctx, pause_bell_asleep(ctx));
        bool work = engine_has_work(ctx);
        int count = pause_fill_fds(ctx, fds);
        bool looking = engine_needs_looking(ctx);
        pthread_mutex_unlock(&ctx->engine_lock);
        if (!work && !atomic_load(&ctx->closed))
            pause_in_poll(fds, count, ctx->heartbeat.interval_ms, looking);
    }
    free(fds);
    return NULL;
}

static void engine_release(bhvd_context *ctx)
{
    // The progress thread sleeps in poll(): from now on bells are for it.
    pause_set_bell(ctx, pause_bell_asleep(ctx));
    bool work = engine_has_work(ctx) || ctx->staged_head;
    pthread_mutex_unlock(&ctx->engine_lock);
    if (work)
        bell_ring(&ctx->connections.bell, 0);
}

// What engine_run may not sleep through: its operation is done, or there is one to execute.
static int has_to_act(bhvd_context *ctx, void *arg)
{
    const struct bhvd_handle *op = arg;
    return operation_is_over(op) || ctx->executions_head;
}

static void engine_run(bhvd_context *ctx, struct bhvd_handle *op, int64_t deadline_ns)
{
    int rounds = 0;
    while (!operation_is_over(op) && !atomic_load(&ctx->closed)) {
        bool progress = engine_poll(ctx, rounds % SOCKET_ROUNDS == 0);
        if (ctx->executions_head && !ctx->failure.status) {
            engine_execute_next(ctx);
            progress = true;
        }
        if (progress) {
            rounds = 0;
            continue;
        }
        if (rounds >= ctx->spin_limit && deadline_ns != CLOCK_NEVER && clock_now_ns() >= deadline_ns)
            return;
        pause_engine(ctx, &rounds, deadline_ns, has_to_act, op);
    }
}

static void wait_for(bhvd_context *ctx, struct bhvd_handle *op, int64_t deadline_ns)
{
    while (!operation_is_over(op)) {
        if (atomic_load(&ctx->closed)) {
            operation_sleep(op, deadline_ns);      // progress_stop ends it
        } else if (pthread_mutex_trylock(&ctx->engine_lock) == 0) {
            pause_set_bell(ctx, BELL_AWAKE);
            engine_run(ctx, op, deadline_ns);
            engine_release(ctx);
        } else {
            // Another thread is at it. It may have looked for posts just before ours and be about to sleep.
            bell_ring(&ctx->connections.bell, 0);
            for (int i = 0; i < HANDOVER_ROUNDS && !operation_is_over(op); i++)
                sched_yield();
            operation_sleep(op, deadline_ns);
        }
        if (deadline_ns != CLOCK_NEVER && clock_now_ns() >= deadline_ns)
            return;
    }
}

void progress_wait(struct bhvd_handle *op, int64_t deadline_ns)
{
    atomic_fetch_add(&op->ctx->waiting, 1);
    wait_for(op->ctx, op, deadline_ns);
    atomic_fetch_sub(&op->ctx->waiting, 1);
}

void progress_posted(bhvd_context *ctx, bool blocking)
{
    if (!blocking)
        bell_ring(&ctx->connections.bell, 0);
}

bhvd_status progress_start(bhvd_context *ctx, struct bhvd_error *error)
{
    if (!pause_init(ctx) || pthread_create(&ctx->progress_thread, NULL, progress_main, ctx) != 0)
        return error_set(error, BHVD_ERR_SYSTEM, "the progress thread could not be started");
    ctx->progress_thread_runs = true;
    return BHVD_OK;
}

// A goodbye may be stuck behind other frames: gives the peers a moment to read them.
static void flush_goodbyes(bhvd_context *ctx)
{
    int64_t deadline_ns = clock_deadline_ns(GOODBYE_MS);
    for (int rank = 0; rank < ctx->options.size; rank++) {
        struct link *link = &ctx->connections.links[rank];
        while (rank != ctx->options.rank && link->state == LINK_OPEN && link->control_out.size &&
               clock_now_ns() < deadline_ns && link_flush(link) == BHVD_OK)
            sched_yield();
    }
}

// The others count on what was agreed on: on this rank's part of it, and on its bytes that have not reached them yet; and on
// what it relays.
static void finish_agreed(bhvd_context *ctx)
{
    int64_t deadline_ns = clock_deadline_ns(ctx->options.timeout_ms);
    ctx->staged_head = NULL;            // nobody has heard of these
    relay_leave(ctx);
    for (;;) {
        while (ctx->executions_head && !ctx->failure.status)
            engine_execute_next(ctx);
        if ((!engine_needs_looking(ctx) && relay_is_free(ctx)) || clock_now_ns() >= deadline_ns)
            return;
        if (!engine_poll(ctx, true))
            sched_yield();
    }
}

void progress_stop(bhvd_context *ctx)
{
    if (atomic_exchange(&ctx->closed, true))
        return;
    late_close(ctx);
    bell_ring(&ctx->connections.bell, 0);
    uint64_t one = 1;
    ssize_t written = write(ctx->connections.bell.fd, &one, sizeof one);
    (void)written;
    if (ctx->progress_thread_runs)
        pthread_join(ctx->progress_thread, NULL);
    pthread_mutex_lock(&ctx->engine_lock);
    finish_agreed(ctx);
    context_fail(ctx, BHVD_ERR_SHUTDOWN, "Horovod has been shut down. (this rank left the job)");
    negotiation_leave(ctx);
    flush_goodbyes(ctx);
    nccl_close_all(ctx);
    mpi_disconnect(&ctx->connections);          // while MPI still runs
    pthread_mutex_unlock(&ctx->engine_lock);
}
