#include "core/progress.h"

#include <errno.h>
#include <poll.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/futex.h"
#include "base/status.h"
#include "collective/collective.h"
#include "collective/nccl.h"
#include "device/staging.h"
#include "transport/channel_mpi.h"

enum {
    SPIN_ROUNDS = 100,          // a few us: a message from a rank that is running comes within that
    SPIN_ROUNDS_CROWDED = 20,   // more ranks than cores: the one that is waited for needs this core
    YIELD_ROUNDS = 1000,        // a rank of this host may share this core although there are others: give it away, again
                                // and again, for up to half a millisecond, before paying for a sleep and a wake-up
    HANDOVER_ROUNDS = 50,       // another thread runs the engine: it may be done in a moment
    SOCKET_ROUNDS = 16,         // looking at a socket is a system call: only every so many rounds
    IDLE_ROUNDS = 200,          // the progress thread looks a little longer before it sleeps: posts come in bursts
    POLLS_PER_LOOK = 256,       // at the clock: takes as long as a poll
    WAITS_PER_POLL = 64,        // of those for what is there already
    GOODBYE_MS = 1000,          // for the last frames to be written
    SLICE_NS = 100000,          // of the progress thread; the kernel's shortest
    LOOK_AGAIN_NS = 100000      // MPI and GPUs have no descriptor to sleep on
};

static inline void cpu_relax(void)
{
#if defined __x86_64__
    __builtin_ia32_pause();
#elif defined __aarch64__
    __asm__ volatile("yield");
#endif
}

// ------------------------------------------------------------------------------------------------------ the engine

static bhvd_status on_frame(void *arg, struct link *link, uint8_t type, struct bytes_reader payload)
{
    return negotiation_frame(arg, link, type, payload);
}

static void fail_link(bhvd_context *ctx, const struct link *link, bhvd_status status)
{
    if (status == BHVD_ERR_PEER_LOST)
        context_fail(ctx, status, "rank %d was lost: its process ended or became unreachable without leaving the job",
                     link->rank);
    else
        context_fail_protocol(ctx, link->rank);
}

static void advance_link(bhvd_context *ctx, struct link *link, bool look_at_sockets, bool *progress)
{
    bool moved = false;
    bool has_output = link->control_out.size || traffic_is_pending(&link->sends);
    bool by_socket = !link->control.ops->readable;
    if (!has_output && !(by_socket && look_at_sockets) && !link_ready(link) && link->state == LINK_OPEN) {
        link_needs_looking(link);           // which looks
        return;
    }
    uint64_t payload_before = link->payload_sent + link->payload_received;
    bhvd_status status = link_advance(link, on_frame, ctx, &moved);
    uint64_t payload = link->payload_sent + link->payload_received - payload_before;
    ctx->messages_moved += payload;
    if (status) {
        fail_link(ctx, link, status);
    } else if (link->state == LINK_LEFT && !moved &&
               (traffic_is_pending(&link->sends) || (traffic_is_pending(&link->receives) && !by_socket))) {
        context_fail(ctx, BHVD_ERR_PEER_LOST, "rank %d left the job while an operation still needed it", link->rank);
    }
    *progress |= moved;
    if (payload && by_socket)
        atomic_fetch_add_explicit(&ctx->connections.bell.word->activity, 1, memory_order_relaxed);
}

// Leaves in the list the operations that can be announced: those whose tensors are in the host's memory. The others wait
// in ctx->staged_head, in the order in which they were posted.
static struct bhvd_handle *keep_ready(bhvd_context *ctx, struct bhvd_handle *posted)
{
    struct bhvd_handle *staged = ctx->staged_head, *ready = NULL, **ready_tail = &ready, **staged_tail = &ctx->staged_head;
    struct bhvd_handle *lists[] = {staged, posted};
    ctx->staged_head = NULL;
    for (int i = 0; i < 2; i++) {
        for (struct bhvd_handle *op = lists[i], *next; op; op = next) {
            struct bhvd_error error;
            const int is_ready = op->staging ? staging_is_ready(op->staging, &error) : 1;
            struct bhvd_handle ***tail = is_ready ? &ready_tail : &staged_tail;
            next = op->next;
            op->next = NULL;
            if (is_ready < 0) {
                context_fail(ctx, error.status, "rank %d: %s", ctx->options.rank, error.message);
                return NULL;
            }
            **tail = op;
            *tail = &op->next;
        }
    }
    return ready;
}

static bool take_posted(bhvd_context *ctx)
{
    if (atomic_load(&ctx->posted_count) == 0 && !ctx->staged_head)
        return false;
    pthread_mutex_lock(&ctx->post_lock);
    struct bhvd_handle *posted = ctx->posted_head;
    ctx->posted_head = NULL;
    ctx->posted_tail = &ctx->posted_head;
    atomic_store(&ctx->posted_count, 0);
    pthread_mutex_unlock(&ctx->post_lock);
    posted = keep_ready(ctx, posted);
    if (posted && negotiation_request(ctx, posted) && !ctx->failure.status)
        context_fail(ctx, BHVD_ERR_SYSTEM, "an operation could not be announced; this process may be out of memory");
    return posted != NULL;
}

// One look at everything that can move. True when something did. Never blocks, executes nothing.
static bool engine_poll(bhvd_context *ctx, bool look_at_sockets)
{
    bool progress = false;
    if (ctx->failure.status)
        return false;
    progress = take_posted(ctx);
    for (int rank = 0; rank < ctx->options.size && !ctx->failure.status; rank++) {
        struct link *link = &ctx->connections.links[rank];
        if (rank != ctx->options.rank)
            advance_link(ctx, link, look_at_sockets, &progress);
    }
    if (!ctx->failure.status && ctx->coordinator.ready_head) {
        if (coordinator_respond(ctx) && !ctx->failure.status)
            context_fail(ctx, BHVD_ERR_SYSTEM, "an operation could not be answered; this process may be out of memory");
        progress = true;
    }
    if (!ctx->failure.status)
        relay_flush(ctx);
    heartbeat_look(ctx, false);
    return progress;
}

// The bell; of each peer a liveness socket, or a control channel and streams.
static size_t poll_fds_size(const bhvd_context *ctx)
{
    return (1 + (1 + LINK_STREAMS_MAX) * (size_t)ctx->options.size) * sizeof(struct pollfd);
}

static int fill_poll_fds(bhvd_context *ctx, struct pollfd *fds)
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

// A liveness socket says something only when its peer is gone.
static void look_at_liveness(bhvd_context *ctx)
{
    for (int rank = 0; rank < ctx->options.size && !ctx->failure.status; rank++) {
        struct link *link = &ctx->connections.links[rank];
        if (rank == ctx->options.rank || link->state != LINK_OPEN || link->liveness_fd < 0)
            continue;
        struct pollfd fd = {.fd = link->liveness_fd, .events = POLLIN | POLLRDHUP};
        bool progress = false;
        if (poll(&fd, 1, 0) > 0) {
            link_hang_up(link, on_frame, ctx, &progress);
            if (link->state == LINK_LOST)
                fail_link(ctx, link, BHVD_ERR_PEER_LOST);
        }
    }
}

static void set_bell(bhvd_context *ctx, enum bell_state state)
{
    atomic_store(&ctx->connections.bell.word->state, state);
}

static enum bell_state sleeping_state(bhvd_context *ctx)
{
    bool waits = atomic_load(&ctx->outstanding) != 0;
    for (int rank = 0; rank < ctx->options.size && !waits; rank++)
        waits = ctx->connections.links[rank].control_out.size != 0;     // for room in a ring
    return waits ? BELL_ASLEEP : BELL_IDLE;
}

// Does an engine that sleeps miss what moves?
static bool needs_looking(bhvd_context *ctx)
{
    if (ctx->staged_head || ctx->waits_for_gpu)
        return true;
    for (int rank = 0; rank < ctx->options.size && !ctx->failure.status; rank++) {
        if (rank != ctx->options.rank && link_needs_looking(&ctx->connections.links[rank]))
            return true;
    }
    return false;
}

// The one place where an engine sleeps. looking: only for a moment.
static void sleep_in_poll(struct pollfd *fds, int count, int timeout_ms, bool looking)
{
    struct timespec timeout = {timeout_ms / 1000, timeout_ms % 1000 * 1000000L};
    if (looking && timeout_ms > 0)
        timeout = (struct timespec){0, LOOK_AGAIN_NS};
    ppoll(fds, (nfds_t)count, &timeout, NULL);
}

static bool computes(bhvd_context *ctx) { return !atomic_load_explicit(&ctx->waiting, memory_order_relaxed); }

// Over a network, while this process computes: every look takes the core from the computation, and a socket that is looked
// at all the time moves a packet at a time. poll() wakes for what is worth it.
static bool is_patient(bhvd_context *ctx) { return computes(ctx) && ctx->connections.local_size == 1; }

// Waits for an event; ready: what the caller waits for, looked at once more after the bell is set. NULL: nothing.
// True when something moved.
static bool engine_sleep(bhvd_context *ctx, int64_t deadline_ns, progress_ready_fn ready, void *arg)
{
    set_bell(ctx, BELL_ASLEEP);
    bool progress = engine_poll(ctx, true);
    if ((!progress || is_patient(ctx)) && !ctx->failure.status && !(ready && ready(ctx, arg))) {
        int timeout = clock_remaining_ms(deadline_ns);
        if (timeout < 0 || timeout > ctx->heartbeat.interval_ms)
            timeout = ctx->heartbeat.interval_ms;
        sleep_in_poll(ctx->poll_fds, fill_poll_fds(ctx, ctx->poll_fds), timeout, needs_looking(ctx));
        bell_drain(&ctx->connections.bell);
        look_at_liveness(ctx);
        progress = engine_poll(ctx, true);      // what came while this process was stopped counts as heard in time
        heartbeat_look(ctx, true);
        nccl_look(ctx);
        stall_check(ctx);
    }
    set_bell(ctx, BELL_AWAKE);
    return progress;
}

// After so many rounds without progress. No yields while this process computes: each would give a whole time slice to its
// own computation, and the peer waits. Who sleeps gets the core back at once.
static bool sleeps_now(bhvd_context *ctx, int rounds)
{
    return is_patient(ctx) || rounds >= ctx->spin_limit + (computes(ctx) ? 0 : ctx->yield_limit);
}

// On a crowded machine each yield may take a time slice of every other program: the clock, and who has died, must be looked at
// meanwhile, just after the sockets.
static void yield(bhvd_context *ctx, int rounds)
{
    sched_yield();
    if (rounds % SOCKET_ROUNDS == 1) {
        look_at_liveness(ctx);
        heartbeat_look(ctx, true);
    }
}

// Waits a moment: spins, then yields the core, then sleeps. *rounds counts since the last progress.
static void engine_pause(bhvd_context *ctx, int *rounds, int64_t deadline_ns, progress_ready_fn ready, void *arg)
{
    ++*rounds;
    if (sleeps_now(ctx, *rounds))
        *rounds = engine_sleep(ctx, deadline_ns, ready, arg) ? 0 : *rounds;
    else if (*rounds < ctx->spin_limit)
        cpu_relax();
    else
        yield(ctx, *rounds);
}

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
    return sleeps_now(ctx, rounds + 1) || polls % POLLS_PER_LOOK == 0 ||
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
        if (!moved || (is_patient(ctx) && !ready(ctx, arg)))
            engine_pause(ctx, &rounds, still.since_ns ? still.since_ns + timeout_ns(ctx) : CLOCK_NEVER, ready, arg);
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

// ------------------------------------------------------------------------------------------------------ executions

static void end_execution(struct execution *execution, const struct bhvd_error *error)
{
    for (int i = 0; i < execution->count; i++) {
        execution->operations[i]->executing = false;
        operation_end(execution->operations[i], error);
    }
    free(execution);
}

static void execute_next(bhvd_context *ctx)
{
    struct execution *execution = ctx->executions_head;
    struct bhvd_error error = {0};
    ctx->executions_head = execution->next;
    if (!ctx->executions_head)
        ctx->executions_tail = &ctx->executions_head;
    for (int i = 0; i < execution->count; i++) {
        execution->operations[i]->executing = true;
        timeline_operation_begin(ctx, execution->operations[i]);
    }
    ctx->counters.executions++;
    ctx->executing = execution->number;
    bhvd_status status = collective_execute(ctx, execution, &error);
    ctx->executing = 0;
    if (ctx->failure.status)
        error = ctx->failure;
    for (int i = 0; i < execution->count; i++)
        timeline_operation_end(ctx, execution->operations[i], status != BHVD_OK);
    end_execution(execution, status ? &error : NULL);
    if (!ctx->failure.status)
        relay_flush(ctx);                       // a process set was added or removed: that can answer others' requests
}

// ------------------------------------------------------------------------------------------- who runs the engine

// Must the progress thread wake for what is there now? Under engine_lock.
static bool engine_has_work(bhvd_context *ctx)
{
    if (ctx->failure.status)
        return false;
    if (atomic_load(&ctx->posted_count) || ctx->executions_head)
        return true;
    // With only the global set nothing can happen before this rank posts: leave the others' requests where they are.
    if (sleeping_state(ctx) == BELL_IDLE && ctx->sets.generation <= 1)
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
    struct pollfd *fds = malloc(poll_fds_size(ctx));
    ask_for_short_slice();
    while (!atomic_load(&ctx->closed) && fds) {
        pthread_mutex_lock(&ctx->engine_lock);
        set_bell(ctx, BELL_AWAKE);
        // Only now, since a waiting thread may have held the engine and be asleep on the same bell: it would miss it.
        bell_drain(&ctx->connections.bell);
        for (int rounds = 0; rounds < IDLE_ROUNDS && !atomic_load(&ctx->closed); rounds++) {
            bool progress = engine_poll(ctx, rounds % SOCKET_ROUNDS == 0);
            while (ctx->executions_head && !ctx->failure.status) {
                execute_next(ctx);
                progress = true;
            }
            if (progress)
                rounds = 0;
            else if (atomic_load(&ctx->outstanding) == 0)
                break;
            else
                cpu_relax();
        }
        look_at_liveness(ctx);
        heartbeat_look(ctx, true);
        nccl_look(ctx);
        stall_check(ctx);
        set_bell(ctx, sleeping_state(ctx));
        bool work = engine_has_work(ctx);
        int count = fill_poll_fds(ctx, fds);
        bool looking = needs_looking(ctx);
        pthread_mutex_unlock(&ctx->engine_lock);
        if (!work && !atomic_load(&ctx->closed))
            sleep_in_poll(fds, count, ctx->heartbeat.interval_ms, looking);
    }
    free(fds);
    return NULL;
}

static void engine_release(bhvd_context *ctx)
{
    // The progress thread sleeps in poll(): from now on bells are for it.
    set_bell(ctx, sleeping_state(ctx));
    bool work = engine_has_work(ctx) || ctx->staged_head;
    pthread_mutex_unlock(&ctx->engine_lock);
    if (work)
        bell_ring(&ctx->connections.bell, 0);
}

// What engine_run may not sleep through: its operation is done, or there is one to execute.
static int has_to_act(bhvd_context *ctx, void *arg)
{
    const struct bhvd_handle *op = arg;
    return atomic_load(&op->done) || ctx->executions_head;
}

static void engine_run(bhvd_context *ctx, struct bhvd_handle *op, int64_t deadline_ns)
{
    int rounds = 0;
    while (!atomic_load(&op->done) && !atomic_load(&ctx->closed)) {
        bool progress = engine_poll(ctx, rounds % SOCKET_ROUNDS == 0);
        if (ctx->executions_head && !ctx->failure.status) {
            execute_next(ctx);
            progress = true;
        }
        if (progress) {
            rounds = 0;
            continue;
        }
        if (rounds >= ctx->spin_limit && deadline_ns != CLOCK_NEVER && clock_now_ns() >= deadline_ns)
            return;
        engine_pause(ctx, &rounds, deadline_ns, has_to_act, op);
    }
}

static void wait_for(bhvd_context *ctx, struct bhvd_handle *op, int64_t deadline_ns)
{
    while (!atomic_load(&op->done)) {
        if (atomic_load(&ctx->closed)) {
            futex_wait(&op->done, 0, deadline_ns);      // progress_stop ends it
        } else if (pthread_mutex_trylock(&ctx->engine_lock) == 0) {
            set_bell(ctx, BELL_AWAKE);
            engine_run(ctx, op, deadline_ns);
            engine_release(ctx);
        } else {
            // Another thread is at it. It may have looked for posts just before ours and be about to sleep.
            bell_ring(&ctx->connections.bell, 0);
            for (int i = 0; i < HANDOVER_ROUNDS && !atomic_load(&op->done); i++)
                sched_yield();
            futex_wait(&op->done, 0, deadline_ns);
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

static int core_count(void)
{
    cpu_set_t set;
    return sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
}

bhvd_status progress_start(bhvd_context *ctx, struct bhvd_error *error)
{
    ctx->spin_limit = ctx->connections.local_size <= core_count() ? SPIN_ROUNDS : SPIN_ROUNDS_CROWDED;
    ctx->yield_limit = ctx->connections.local_size > 1 ? YIELD_ROUNDS : 0;
    ctx->poll_fds = malloc(poll_fds_size(ctx));
    if (!ctx->poll_fds || pthread_create(&ctx->progress_thread, NULL, progress_main, ctx) != 0)
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
            execute_next(ctx);
        if ((!needs_looking(ctx) && relay_is_free(ctx)) || clock_now_ns() >= deadline_ns)
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
