#include "core/api/api.h"

#include <sched.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/status.h"
#include "base/thread.h"
#include "core/context/operation.h"
#include "core/engine/engine.h"
#include "core/engine/process_sets.h"
#include "core/health/health.h"
#include "core/negotiation/coordinator.h"
#include "core/negotiation/departure.h"
#include "core/negotiation/pairwise.h"
#include "executor/wait.h"

enum {
    BUSY_ENGINE_ROUNDS = 50,    // another thread runs the engine: the operation may be over soon
    IDLE_ROUNDS = 200,          // the progress thread polls a little longer before it sleeps, because posts come in bursts
    NAP_MAX_MS = 16,            // of the progress thread while another thread runs the engine
    GOODBYE_MS = 1000,          // limit for writing the last frames
    SLICE_NS = 100000           // time slice of the progress thread; the kernel's minimum
};

static enum doorbell_state doorbell_asleep(bhvd_context *ctx)
{
    return atomic_load(&ctx->outstanding) || executor_waits_for_room(&ctx->exec) ? DOORBELL_ASLEEP : DOORBELL_IDLE;
}

// Is there work for which the progress thread must wake now? Under engine_lock.
static bool engine_has_work(bhvd_context *ctx)
{
    if (ctx->exec.failure.status)
        return tasks_are_running(&ctx->exec);   // running tasks end at the next poll
    const bool may_start = ctx->pairwise->changed && ctx->pairwise->waiting;
    if (atomic_load(&ctx->posted_count) || engine_has_next(ctx) || ctx->coordinator->ready.head || may_start)
        return true;
    // With only the global set nothing can happen before this rank posts: leave the others' requests unread.
    if (doorbell_asleep(ctx) == DOORBELL_IDLE && ctx->sets.generation <= 1)
        return false;
    return executor_has_work(&ctx->exec);
}

// Sets a short time slice (Linux 6.12 or later): when the progress thread wakes, the kernel then lets it preempt a computation
// on its core. Its share of CPU time stays the same. No effect on other kernels.
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

// A thread that waits for its operation runs the engine, and sockets wake that thread as well as this one: this thread is not
// needed for each of its operations. But the doorbell rings for this thread: something was posted or left behind (engine_release).
static bool take_engine(bhvd_context *ctx, int *nap_ms)
{
    const struct doorbell *doorbell = &ctx->exec.connections.doorbell;
    if (pthread_mutex_trylock(&ctx->engine_lock) == 0 ||
        (doorbell_is_rung(doorbell) && pthread_mutex_lock(&ctx->engine_lock) == 0)) {
        *nap_ms = 1;
        return true;
    }
    pause_in_poll(&ctx->exec.connections, false, *nap_ms, false);
    *nap_ms = 2 * *nap_ms < NAP_MAX_MS ? 2 * *nap_ms : NAP_MAX_MS;
    return false;
}

static void *progress_main(void *arg)
{
    bhvd_context *ctx = arg;
    int nap_ms = 1;
    ask_for_short_slice();
    while (!atomic_load(&ctx->leaving)) {
        if (!take_engine(ctx, &nap_ms))
            continue;
        pause_set_doorbell(&ctx->exec, DOORBELL_AWAKE);
        // Not earlier: a waiting thread may have held the engine and slept on the same doorbell, and would miss it.
        doorbell_drain(&ctx->exec.connections.doorbell);
        // Messages from other hosts wake this thread; until then leave the core to the computation.
        const int limit = tasks_are_running(&ctx->exec) && pause_blocks(&ctx->exec) ? 1 : IDLE_ROUNDS;
        for (int rounds = 0; rounds < limit && !atomic_load(&ctx->leaving); rounds++) {
            bool progress = engine_poll(ctx, rounds % SOCKET_ROUNDS == 0);
            while (engine_has_next(ctx)) {
                engine_execute_next(ctx);
                progress = true;
            }
            if (progress)
                rounds = -1;            // poll at least once more: new work may be over already
            else if (atomic_load(&ctx->outstanding) == 0)
                break;
            else
                pause_processor();
        }
        executor_check_liveness(&ctx->exec);
        engine_check_timers(ctx);
        block_pool_trim(&ctx->exec.memory, clock_now_ns() - clock_ms_ns(MEMORY_IDLE_MS));
        pause_set_doorbell(&ctx->exec, doorbell_asleep(ctx));
        bool has_work = engine_has_work(ctx);
        const bool links_too = !ctx->exec.failure.status;
        bool must_poll = engine_needs_poll(ctx);
        pthread_mutex_unlock(&ctx->engine_lock);
        if (!has_work && !atomic_load(&ctx->leaving))
            pause_in_poll(&ctx->exec.connections, links_too, ctx->heartbeat->interval_ms, must_poll);
    }
    return NULL;
}

static void engine_release(bhvd_context *ctx)
{
    // The progress thread sleeps in poll(): from now on doorbells wake it.
    pause_set_doorbell(&ctx->exec, doorbell_asleep(ctx));
    // It chose its descriptors before the work that is now in flight; and it may nap, without links, while another thread sleeps
    // until its operation has ended.
    const bool others_wait = atomic_load(&ctx->exec.waiting) > 1;
    bool has_work = engine_has_work(ctx) || ctx->staged.head || tasks_are_running(&ctx->exec) || others_wait;
    pthread_mutex_unlock(&ctx->engine_lock);
    if (has_work)
        doorbell_ring(&ctx->exec.connections.doorbell, 0);
}

// The events for which engine_run must wake: its operation is done, or there is one to execute.
static int has_to_act(struct executor *exec, void *arg)
{
    const struct bhvd_operation *op = arg;
    (void)exec;
    return operation_is_complete(op) || engine_has_next(op->ctx);
}

static void engine_run(bhvd_context *ctx, struct bhvd_operation *op, int64_t deadline_ns)
{
    int rounds = 0;
    for (uint32_t polls = 1; !operation_is_complete(op) && !atomic_load(&ctx->leaving); polls++) {
        bool progress = engine_poll(ctx, rounds % SOCKET_ROUNDS == 0);
        if (engine_has_next(ctx)) {
            engine_execute_next(ctx);
            progress = true;
        }
        if (progress)
            rounds = 0;
        const bool checks_clock = deadline_ns != CLOCK_NEVER && (rounds >= ctx->exec.spin_limit || polls % POLLS_PER_CHECK == 0);
        if (checks_clock && clock_now_ns() >= deadline_ns)
            return;
        if (!progress)
            pause_engine(&ctx->exec, &rounds, deadline_ns, has_to_act, op);
    }
}

static void wait_for(bhvd_context *ctx, struct bhvd_operation *op, int64_t deadline_ns)
{
    while (!operation_is_complete(op)) {
        if (atomic_load(&ctx->leaving)) {
            operation_sleep(op, deadline_ns);      // progress_stop ends it
        } else if (pthread_mutex_trylock(&ctx->engine_lock) == 0) {
            pause_set_doorbell(&ctx->exec, DOORBELL_AWAKE);
            engine_run(ctx, op, deadline_ns);
            engine_release(ctx);
        } else {
            // Another thread runs the engine. It may have checked for posts just before ours and be about to sleep.
            doorbell_ring(&ctx->exec.connections.doorbell, 0);
            for (int i = 0; i < BUSY_ENGINE_ROUNDS && !operation_is_complete(op); i++)
                sched_yield();
            operation_sleep(op, deadline_ns);
        }
        if (deadline_ns != CLOCK_NEVER && clock_now_ns() >= deadline_ns)
            return;
    }
}

void progress_wait(struct bhvd_operation *op, int64_t deadline_ns)
{
    atomic_fetch_add(&op->ctx->exec.waiting, 1);
    wait_for(op->ctx, op, deadline_ns);
    atomic_fetch_sub(&op->ctx->exec.waiting, 1);
}

bhvd_status progress_start(bhvd_context *ctx, struct bhvd_error *error)
{
    pause_init(&ctx->exec);
    if (thread_create(&ctx->progress_thread, progress_main, ctx) != 0)
        return error_set(error, BHVD_ERR_SYSTEM, "the progress thread could not be started");
    ctx->progress_thread_runs = true;
    return BHVD_OK;
}

// A goodbye may be queued behind other frames: gives the peers a moment to read them.
static void flush_goodbyes(bhvd_context *ctx)
{
    int64_t deadline_ns = clock_deadline_ns(GOODBYE_MS);
    for (int rank = 0; rank < ctx->options.size; rank++) {
        struct link *link = &ctx->exec.connections.links[rank];
        while (rank != ctx->options.rank && link->state == LINK_OPEN && link->control_out.size &&
               clock_now_ns() < deadline_ns && link_flush(link) == BHVD_OK)
            sched_yield();
    }
}

// The other ranks rely on agreed operations: on this rank's part, and on data that has not reached them yet. Ranks that it
// relays for rely on it until they leave, however long that takes.
static void finish_agreed(bhvd_context *ctx)
{
    const int64_t deadline_ns = clock_deadline_ns(ctx->options.timeout_ms);
    engine_poll(ctx, true);             // requests posted operations, so that what follows holds for them, too
    ctx->staged.head = NULL;            // not requested yet
    if (departure_begin(ctx))
        executor_fail(&ctx->exec, BHVD_ERR_SYSTEM, "no memory to leave the job");
    for (int rounds = 0;;) {
        pairwise_leave(ctx);
        while (engine_has_next(ctx))
            engine_execute_next(ctx);
        const bool is_busy = ((engine_is_busy(ctx) || ctx->pairwise->waiting) && !ctx->exec.failure.status) ||
                             engine_needs_poll(ctx);
        const bool waits = is_busy && clock_now_ns() < deadline_ns;
        if (!waits && departure_is_free(ctx))
            return;
        if (engine_poll(ctx, true))
            rounds = 0;
        else
            pause_engine(&ctx->exec, &rounds, waits ? deadline_ns : CLOCK_NEVER, NULL, NULL);
    }
}

void progress_stop(bhvd_context *ctx)
{
    if (atomic_exchange(&ctx->leaving, true))
        return;
    doorbell_ring(&ctx->exec.connections.doorbell, 0);
    eventfd_write(ctx->exec.connections.doorbell.fd, 1);
    if (ctx->progress_thread_runs)
        pthread_join(ctx->progress_thread, NULL);
    pthread_mutex_lock(&ctx->engine_lock);
    finish_agreed(ctx);
    communicators_await(ctx);
    executor_fail(&ctx->exec, BHVD_ERR_SHUTDOWN, "Horovod has been shut down. (this rank left the job)");
    tasks_abort(&ctx->exec);
    departure_send_goodbye(ctx);
    flush_goodbyes(ctx);
    communicators_close_all(ctx);
    connections_close(&ctx->exec.connections);
    pthread_mutex_unlock(&ctx->engine_lock);
}
