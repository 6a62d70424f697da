#include "core/execution/engine.h"

#include <stdlib.h>

#include "base/clock.h"
#include "base/fifo.h"
#include "base/status.h"
#include "core/execution/communicators.h"
#include "core/execution/select.h"
#include "core/health/heartbeat.h"
#include "core/health/stall.h"
#include "core/negotiation/coordinator.h"
#include "core/negotiation/departure.h"
#include "core/negotiation/pairwise.h"
#include "core/negotiation/member.h"
#include "gpu/staging.h"
#include "run/pause.h"
#include "run/plan.h"

// Returns the operations that can be announced: those whose tensors are in host memory. The others wait
// in ctx->staged, in posting order.
static struct bhvd_handle *keep_ready(bhvd_context *ctx, struct bhvd_handle *posted)
{
    struct bhvd_handle *staged = fifo_take_all(&ctx->staged), *lists[] = {staged, posted};
    struct FIFO(struct bhvd_handle) ready = {0};
    const struct bhvd_device *behind = NULL;        // its copies for an earlier operation are not done, so no later one's are
    for (int i = 0; i < 2; i++) {
        for (struct bhvd_handle *op = lists[i], *next; op; op = next) {
            struct bhvd_error error;
            const struct staging *staging = op->work.staging;
            const bool in_order = staging && !staging->direct;
            const bool is_behind = in_order && staging->device == behind;
            const int is_ready = !staging ? 1 : is_behind ? 0 : staging_is_ready(staging, &error);
            behind = in_order && !is_ready ? staging->device : behind;
            next = op->next;
            if (is_ready < 0) {
                run_fail(&ctx->run, error.status, "rank %d: %s", ctx->options.rank, error.message);
                return NULL;
            }
            if (is_ready)
                fifo_put(&ready, op, next);
            else
                fifo_put(&ctx->staged, op, next);
        }
    }
    return ready.head;
}

static bool take_posted(bhvd_context *ctx)
{
    if (atomic_load(&ctx->posted_count) == 0 && !ctx->staged.head)
        return false;
    pthread_mutex_lock(&ctx->post_lock);
    struct bhvd_handle *posted = fifo_take_all(&ctx->posted);
    atomic_store(&ctx->posted_count, 0);
    pthread_mutex_unlock(&ctx->post_lock);
    posted = keep_ready(ctx, posted);
    if (posted && member_request(ctx, posted) && !ctx->run.failure.status)
        run_fail(&ctx->run, BHVD_ERR_SYSTEM, "an operation could not be announced; this process may be out of memory");
    return posted != NULL;
}

void engine_check_timers(bhvd_context *ctx)
{
    heartbeat_look(ctx);
    communicators_look(ctx);
    stall_check(ctx);
    pairwise_check_stalls(ctx);
    departure_check_timer(ctx, clock_now_ns());
    run_look_at_schedules(&ctx->run);
}

bool engine_needs_poll(bhvd_context *ctx)
{
    return ctx->staged.head || ctx->run.waits_for_gpu || run_links_need_poll(&ctx->run);
}

// ------------------------------------------------------------------------------------------------------------ executions

// Counts bytes for the operations of an execution, in proportion to their sizes.
static void count_sent(bhvd_context *ctx, const struct execution *execution)
{
    const uint64_t sent[] = {execution->sent.shm, execution->sent.tcp, execution->sent.mpi};
    uint64_t total = 0, until = 0, counted[3] = {0};
    for (int i = 0; i < execution->count; i++)
        total += work_nbytes(execution->works[i]);
    for (int i = 0; i < execution->count; i++) {
        until += work_nbytes(execution->works[i]);
        for (int medium = 0; medium < 3; medium++) {
            const uint64_t upto = until == total ? sent[medium] : (uint64_t)((double)sent[medium] * (double)until / (double)total);
            if (upto != counted[medium])
                ctx->byte_counters[operation_of(execution->works[i])->byte_counter][medium] += upto - counted[medium];
            counted[medium] = upto;
        }
    }
}

static void end_execution(bhvd_context *ctx, struct execution *execution, bhvd_status status, const struct bhvd_error *error)
{
    count_sent(ctx, execution);
    for (int i = 0; i < execution->count && ctx->timeline.open; i++) {
        const struct bhvd_handle *op = operation_of(execution->works[i]);
        const struct operation_key key = operation_key_of(op);
        if (!op->work.is_proxy)
            timeline_operation_end(&ctx->timeline, &key, &op->request, status != BHVD_OK);
    }
    for (int i = 0; i < execution->count; i++) {
        operation_end(operation_of(execution->works[i]), status ? error : NULL);
    }
    plan_fini(&ctx->run, &execution->plan);
    free(execution);
}

static void end_started(void *arg, bhvd_status status)
{
    struct execution *execution = arg;
    bhvd_context *ctx = operation_of(execution->works[0])->ctx;
    end_execution(ctx, execution, status, &ctx->run.failure);
}

bool engine_has_next(const bhvd_context *ctx)
{
    const struct execution *next = ctx->executions.head;
    const uint64_t oldest = executor_oldest(&ctx->run);
    return next && !ctx->run.failure.status && (!oldest || oldest > next->after) &&
           !executor_uses_memory(&ctx->run, work_exclusive_memory(next->works[0]));
}

bool engine_is_busy(const bhvd_context *ctx) { return ctx->executions.head || executor_is_busy(&ctx->run); }

static void begin_execution(bhvd_context *ctx, struct execution *execution)
{
    for (int i = 0; i < execution->count; i++) {
        struct bhvd_handle *op = operation_of(execution->works[i]);
        op->phase = OPERATION_EXECUTING;
        if (ctx->timeline.open && !op->work.is_proxy) {
            const struct operation_key key = operation_key_of(op);
            timeline_begin(&ctx->timeline, &key, "", operation_kind_name(op->work.kind, op->work.op));
        }
    }
    ctx->counters.executions++;
    ctx->run.sent = &execution->sent;
}

// Starts a plan, which runs concurrently. False: the execution is over. A failure of the run overrides its own error.
static bool start_or_end(bhvd_context *ctx, struct execution *execution, bhvd_status status, struct bhvd_error *error)
{
    if (!status && execution->plan.made && !plan_start(&ctx->run, &execution->plan, end_started, execution, NULL))
        return true;
    if (ctx->run.failure.status) {
        status = ctx->run.failure.status;
        *error = ctx->run.failure;
    }
    end_execution(ctx, execution, status, error);
    return false;
}

static void execute_pairwise(bhvd_context *ctx, struct bhvd_handle *op, uint32_t id, const struct wire *wire)
{
    struct execution *execution = malloc(sizeof *execution + sizeof execution->works[0]);
    const struct wire wire_before = ctx->run.wire;
    struct sent *sent_before = ctx->run.sent;
    struct bhvd_error error = {0};
    if (!execution) {
        run_fail(&ctx->run, BHVD_ERR_SYSTEM, "no memory to start an operation");
        return;
    }
    *execution = (struct execution){.process_set = op->process_set, .count = 1};
    execution->works[0] = &op->work;
    begin_execution(ctx, execution);
    ctx->run.wire = *wire;                       // this may be called during another execution
    bhvd_status status = select_pairwise(ctx, op, &execution->plan, &error);
    ctx->run.wire = wire_before;
    execution->plan.operands.execution = LINK_PAIRWISE | id;
    start_or_end(ctx, execution, status, &error);
    ctx->run.sent = sent_before;
}

void engine_execute_next(bhvd_context *ctx)
{
    struct execution *execution = fifo_take(&ctx->executions, next);
    struct bhvd_error error = {0};
    begin_execution(ctx, execution);
    ctx->executing = execution->number;
    ctx->run.connections.started = execution->number;
    ctx->run.wire = execution->wire;
    ctx->measured = (uint64_t)execution->wire.hop_ns << 32 | execution->wire.byte_ps;
    bhvd_status status = select_execute(ctx, execution, &error);
    ctx->executing = 0;
    const bool goes_on = start_or_end(ctx, execution, status, &error);
    ctx->run.sent = NULL;
    if (goes_on)
        return;
    if (!ctx->run.failure.status)
        relay_flush(ctx);                       // a process set was added or removed, so others' requests may have got responses
}

// Starts operations that all neighbors have posted.
static bool start_pairwise(bhvd_context *ctx)
{
    bool progress = false;
    uint32_t id;
    struct wire wire;
    for (struct bhvd_handle *op; ctx->pairwise->changed && !ctx->run.failure.status && (op = pairwise_next(ctx, &id, &wire)); progress = true) {
        if (!operation_is_over(op))
            execute_pairwise(ctx, op, id, &wire);
        operation_drop(op);
    }
    return progress;
}

bool engine_poll(bhvd_context *ctx, bool look_at_sockets)
{
    bool progress = false;
    if (ctx->run.failure.status) {
        executor_abort(&ctx->run);
        return false;
    }
    progress = take_posted(ctx);
    progress |= run_advance_links(&ctx->run, look_at_sockets);
    progress |= start_pairwise(ctx);
    if (!ctx->run.failure.status && ctx->coordinator->ready.head) {
        if (coordinator_respond(ctx) && !ctx->run.failure.status)
            run_fail(&ctx->run, BHVD_ERR_SYSTEM, "an operation got no response; this process may be out of memory");
        progress = true;
    }
    if (!ctx->run.failure.status)
        relay_flush(ctx);
    if (++ctx->polls % POLLS_PER_LOOK == 0)
        engine_check_timers(ctx);           // continuous progress must not prevent this check
    return progress;
}

// -------------------------------------------------------------------------------------------------------------- frames

static bhvd_status take_down(bhvd_context *ctx, enum frame_type type, struct bytes_reader payload)
{
    return type == FRAME_RESPONSE ? member_take_response(ctx, payload)
           : type == FRAME_STALE  ? member_take_stale(ctx, payload)
                                  : BHVD_ERR_SYSTEM;
}

const struct relay_receivers engine_receivers = {.up = coordinator_take_bundled, .down = take_down};

// Frames of the negotiation.
static bhvd_status take_negotiation(bhvd_context *ctx, struct link *link, uint8_t type, struct bytes_reader payload)
{
    ctx->counters.negotiation_messages++;
    if (type == FRAME_UP)
        return relay_take_up(ctx, link, payload);
    if (type == FRAME_DOWN)
        return relay_take_down(ctx, link, payload);
    return type == FRAME_CLOSING ? departure_take_closing(ctx, link, payload) : BHVD_ERR_SYSTEM;
}

// Dispatches the control frames of peers.
static bhvd_status on_frame(void *owner, struct link *link, uint8_t type, struct bytes_reader payload)
{
    bhvd_context *ctx = owner;
    if (link->state != LINK_OPEN)
        return BHVD_OK;                     // after its goodbye: nothing that these could be about is in progress
    if (type == FRAME_GOODBYE)
        return departure_take_goodbye(ctx, link, payload);
    if (type == FRAME_HEARTBEAT)
        return heartbeat_take(ctx, link, payload);
    if (type == FRAME_STALLED)
        return stall_take_notice(ctx, link, payload);
    if (type == FRAME_PAIRWISE_READY)
        return pairwise_take_ready(ctx, link, payload);
    if (type == FRAME_PAIRWISE_REVOKE)
        return pairwise_take_revoke(ctx, link, payload);
    return take_negotiation(ctx, link, type, payload);
}

// ---------------------------------------------------------------------------------------- callbacks of the executor

static void failed(bhvd_context *ctx, const struct bhvd_error *error)
{
    context_end_all(ctx, error);
    if (error->status != BHVD_ERR_SHUTDOWN) {
        departure_say_goodbye(ctx);
        communicators_abort(ctx);       // work on the GPU that waits for a peer would wait for ever
    }
}

const struct executor_callbacks engine_callbacks = {
    .on_frame = on_frame,
    .poll = engine_poll,
    .keep_alive = heartbeat_look,
    .check_timers = engine_check_timers,
    .needs_poll = engine_needs_poll,
    .others_are_earlier = heartbeat_others_are_earlier,
    .failed = failed,
};
