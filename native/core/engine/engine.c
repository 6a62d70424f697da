#include "core/engine/engine.h"

#include <stdlib.h>

#include "base/status.h"
#include "core/engine/process_sets.h"
#include "core/health/health.h"
#include "core/negotiation/coordinator.h"
#include "core/negotiation/departure.h"
#include "core/negotiation/member.h"
#include "core/negotiation/pairwise.h"
#include "executor/wait.h"
#include "gpu/staging.h"

// Returns the operations that can be requested: those whose tensors are in host memory. The others wait
// in ctx->staged, in posting order.
static struct bhvd_operation *keep_ready(bhvd_context *ctx, struct bhvd_operation *posted)
{
    struct bhvd_operation *staged = fifo_take_all(&ctx->staged), *lists[] = {staged, posted};
    struct FIFO(struct bhvd_operation) ready = {0};
    const struct bhvd_device *behind = NULL;        // its stream is in order: after the first unfinished copy all are unfinished
    for (int i = 0; i < 2; i++) {
        for (struct bhvd_operation *op = lists[i], *next; op; op = next) {
            struct bhvd_error error;
            const struct staging *staging = op->coll.staging;
            const bool in_order = staging && !staging->direct;
            const bool is_behind = in_order && staging->device == behind;
            const int is_ready = !staging ? 1 : is_behind ? 0 : staging_is_ready(staging, &error);
            behind = in_order && !is_ready ? staging->device : behind;
            next = op->next;
            if (is_ready < 0) {
                executor_fail(&ctx->exec, error.status, "rank %d: %s", ctx->options.rank, error.message);
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

// Fails the executor after an error in requests or responses, unless it has failed already.
static void fail(bhvd_context *ctx, bhvd_status status, const char *what)
{
    if (ctx->exec.failure.status)
        return;
    if (status == BHVD_ERR_PROTOCOL)
        executor_fail_protocol(&ctx->exec, COORDINATOR);
    else
        executor_fail(&ctx->exec, BHVD_ERR_SYSTEM, "%s; this process may be out of memory", what);
}

static bool take_posted(bhvd_context *ctx)
{
    if (atomic_load(&ctx->posted_count) == 0 && !ctx->staged.head)
        return false;
    pthread_mutex_lock(&ctx->post_lock);
    struct bhvd_operation *posted = fifo_take_all(&ctx->posted);
    atomic_store(&ctx->posted_count, 0);
    pthread_mutex_unlock(&ctx->post_lock);
    posted = keep_ready(ctx, posted);
    const bhvd_status status = posted ? member_request(ctx, posted) : BHVD_OK;
    if (status)
        fail(ctx, status, "an operation could not be requested");
    return posted != NULL;
}

void engine_check_timers(bhvd_context *ctx)
{
    heartbeat_check(ctx);
    communicators_check(ctx);
    if (!ctx->exec.failure.status) {
        stall_check(ctx);
        pairwise_check_stalls(ctx);
    }
    departure_check_timer(ctx, clock_now_ns());
    executor_check_progress(&ctx->exec);
}

bool engine_needs_poll(bhvd_context *ctx)
{
    return ctx->staged.head || ctx->exec.waits_for_gpu || executor_needs_poll(&ctx->exec);
}

// ------------------------------------------------------------------------------------------------------------ executions

// Counts bytes for the operations of an execution, in proportion to their sizes.
static void count_sent(bhvd_context *ctx, const struct execution *execution)
{
    const uint64_t sent[] = {execution->sent.shm_bytes, execution->sent.tcp_bytes, execution->sent.mpi_bytes};
    uint64_t total = 0, until = 0, counted[3] = {0};
    for (int i = 0; i < execution->count; i++)
        total += collective_nbytes(execution->colls[i]);
    for (int i = 0; i < execution->count; i++) {
        until += collective_nbytes(execution->colls[i]);
        for (int medium = 0; medium < 3; medium++) {
            const uint64_t upto = until == total ? sent[medium] : (uint64_t)((double)sent[medium] * (double)until / (double)total);
            if (upto != counted[medium])
                ctx->byte_counters[execution->colls[i]->args.byte_counter][medium] += upto - counted[medium];
            counted[medium] = upto;
        }
    }
}

static void complete_execution(bhvd_context *ctx, struct execution *execution, bhvd_status status, const struct bhvd_error *error)
{
    count_sent(ctx, execution);
    for (int i = 0; i < execution->count && ctx->timeline.open; i++) {
        const struct bhvd_operation *op = operation_of(execution->colls[i]);
        if (!op->coll.is_proxy)
            timeline_operation_end(&ctx->timeline, &op->key, &op->request, status != BHVD_OK);
    }
    for (int i = 0; i < execution->count; i++)
        operation_complete(operation_of(execution->colls[i]), status ? error : NULL);
    plan_fini(&execution->plan);
    free(execution);
}

static void on_complete(void *arg, bhvd_status status)
{
    struct execution *execution = arg;
    bhvd_context *ctx = operation_of(execution->colls[0])->ctx;
    complete_execution(ctx, execution, status, &ctx->exec.failure);
}

bool engine_has_next(const bhvd_context *ctx)
{
    const struct execution *next = ctx->executions.head;
    const uint64_t oldest = tasks_oldest_execution(&ctx->exec);
    return next && !ctx->exec.failure.status && (!oldest || oldest > next->after) &&
           !tasks_use_memory(&ctx->exec, collective_exclusive_memory(next->colls[0]));
}

bool engine_is_busy(const bhvd_context *ctx) { return ctx->executions.head || tasks_are_running(&ctx->exec); }

static void begin_execution(bhvd_context *ctx, struct execution *execution)
{
    for (int i = 0; i < execution->count; i++) {
        struct bhvd_operation *op = operation_of(execution->colls[i]);
        op->phase = OPERATION_EXECUTING;
        if (!op->coll.is_proxy)
            timeline_begin(&ctx->timeline, &op->key, TIMELINE_EXECUTION, operation_kind_name(op->coll.args.kind, op->coll.args.op));
    }
    ctx->counters.executions++;
    ctx->exec.sent = &execution->sent;
}

// Starts a plan, which runs concurrently. False: the execution is over. A failure of the executor overrides its own error.
static bool start_or_complete(bhvd_context *ctx, struct execution *execution, bhvd_status status, struct bhvd_error *error)
{
    if (!status && execution->plan.group && !plan_start(&ctx->exec, &execution->plan, on_complete, execution))
        return true;
    if (ctx->exec.failure.status) {
        status = ctx->exec.failure.status;
        *error = ctx->exec.failure;
    }
    complete_execution(ctx, execution, status, error);
    return false;
}

static void execute_pairwise(bhvd_context *ctx, struct bhvd_operation *op, uint32_t id, const struct network_cost *network)
{
    struct execution *execution = malloc(sizeof *execution + sizeof execution->colls[0]);
    const struct network_cost network_before = ctx->exec.network;
    struct bhvd_sent *sent_before = ctx->exec.sent;
    struct bhvd_error error = {0};
    if (!execution) {
        executor_fail(&ctx->exec, BHVD_ERR_SYSTEM, "no memory to start an operation");
        return;
    }
    *execution = (struct execution){.process_set = op->key.process_set, .count = 1};
    execution->colls[0] = &op->coll;
    begin_execution(ctx, execution);
    ctx->exec.network = *network;                // this may be called during another execution
    bhvd_status status = execution_run_pairwise(ctx, op, &execution->plan, &error);
    ctx->exec.network = network_before;
    execution->plan.operands.execution = LINK_PAIRWISE | id;
    start_or_complete(ctx, execution, status, &error);
    ctx->exec.sent = sent_before;
}

void engine_execute_next(bhvd_context *ctx)
{
    struct execution *execution = fifo_take(&ctx->executions, next);
    struct bhvd_error error = {0};
    begin_execution(ctx, execution);
    ctx->executing = execution->number;
    ctx->exec.connections.started = execution->number;
    ctx->exec.network = execution->network;
    ctx->measured = (uint64_t)execution->network.alpha_ns << 32 | execution->network.beta_ps;
    bhvd_status status = execution_run(ctx, execution, &error);
    ctx->executing = 0;
    const bool goes_on = start_or_complete(ctx, execution, status, &error);
    ctx->exec.sent = NULL;
    if (!goes_on && !ctx->exec.failure.status)
        relay_flush(ctx);                       // a process set was added or removed, so others' requests may have got responses
}

// Starts operations that all neighbors have posted.
static bool start_pairwise(bhvd_context *ctx)
{
    bool progress = false;
    uint32_t id;
    struct network_cost network;
    struct bhvd_operation *op;
    for (; ctx->pairwise->changed && !ctx->exec.failure.status && (op = pairwise_next(ctx, &id, &network)); progress = true) {
        if (!operation_is_complete(op))
            execute_pairwise(ctx, op, id, &network);
        operation_release(op);
    }
    return progress;
}

bool engine_poll(bhvd_context *ctx, bool poll_sockets)
{
    bool progress = false;
    if (ctx->exec.failure.status) {
        tasks_abort(&ctx->exec);
        return false;
    }
    progress = take_posted(ctx);
    progress |= executor_poll(&ctx->exec, poll_sockets);
    progress |= start_pairwise(ctx);
    if (!ctx->exec.failure.status && ctx->coordinator->ready.head) {
        const bhvd_status status = coordinator_respond(ctx);
        if (status)
            fail(ctx, status, "an operation got no response");
        progress = true;
    }
    if (!ctx->exec.failure.status)
        relay_flush(ctx);
    if (++ctx->polls % POLLS_PER_CHECK == 0)
        engine_check_timers(ctx);           // continuous progress must not prevent this check
    return progress;
}

// -------------------------------------------------------------------------------------------------------------- frames

static bhvd_status on_down(bhvd_context *ctx, enum frame_type type, struct bytes_reader payload)
{
    return type == FRAME_RESPONSE     ? member_on_response(ctx, payload)
           : type == FRAME_CACHE_MISS ? member_on_cache_miss(ctx, payload)
                                      : BHVD_ERR_PROTOCOL;
}

const struct relay_receivers engine_receivers = {.up = coordinator_on_requests, .down = on_down};

// Dispatches the control frames of peers.
static bhvd_status on_frame(void *arg, struct link *link, uint8_t type, struct bytes_reader payload)
{
    bhvd_context *ctx = arg;
    if (link->state != LINK_OPEN)
        return BHVD_OK;                     // it has said goodbye: the operations that the frame is about have ended
    ctx->counters.negotiation_messages += type == FRAME_UP || type == FRAME_DOWN || type == FRAME_CLOSING;
    switch (type) {
    case FRAME_UP: return relay_on_up(ctx, link, payload);
    case FRAME_DOWN: return relay_on_down(ctx, link, payload);
    case FRAME_CLOSING: return departure_on_closing(ctx, link, payload);
    case FRAME_GOODBYE: return departure_on_goodbye(ctx, link, payload);
    case FRAME_HEARTBEAT: return heartbeat_on_frame(ctx, link, payload);
    case FRAME_STALLED: return stall_on_notice(ctx, link, payload);
    case FRAME_PAIRWISE_READY: return pairwise_on_ready(ctx, link, payload);
    case FRAME_PAIRWISE_REVOKE: return pairwise_on_revoke(ctx, link, payload);
    default: return BHVD_ERR_PROTOCOL;
    }
}

// ---------------------------------------------------------------------------------------- callbacks of the executor

static void failed(bhvd_context *ctx, const struct bhvd_error *error)
{
    context_abort(ctx, error);
    if (error->status != BHVD_ERR_SHUTDOWN) {
        departure_send_goodbye(ctx);
        communicators_abort(ctx);       // work on the GPU that waits for a peer would wait for ever
    }
}

const struct executor_callbacks engine_callbacks = {
    .on_frame = on_frame,
    .poll = engine_poll,
    .keep_alive = heartbeat_check,
    .check_timers = engine_check_timers,
    .needs_poll = engine_needs_poll,
    .others_are_earlier = heartbeat_others_are_earlier,
    .failed = failed,
};
