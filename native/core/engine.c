#include "core/engine.h"

#include <stdlib.h>

#include "base/status.h"
#include "core/communicators.h"
#include "core/select.h"
#include "gpu/staging.h"

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
            const int is_ready = op->work.staging ? staging_is_ready(op->work.staging, &error) : 1;
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
    if (posted && negotiation_request(ctx, posted) && !ctx->run.failure.status)
        context_fail(ctx, BHVD_ERR_SYSTEM, "an operation could not be announced; this process may be out of memory");
    return posted != NULL;
}

bool engine_poll(bhvd_context *ctx, bool look_at_sockets)
{
    bool progress = false;
    if (ctx->run.failure.status)
        return false;
    progress = take_posted(ctx);
    progress |= run_advance_links(&ctx->run, look_at_sockets);
    if (!ctx->run.failure.status && ctx->coordinator.ready_head) {
        if (coordinator_respond(ctx) && !ctx->run.failure.status)
            context_fail(ctx, BHVD_ERR_SYSTEM, "an operation could not be answered; this process may be out of memory");
        progress = true;
    }
    if (!ctx->run.failure.status)
        relay_flush(ctx);
    heartbeat_look(ctx, false);
    return progress;
}

void engine_look_around(bhvd_context *ctx)
{
    heartbeat_look(ctx, true);
    communicators_look(ctx);
    stall_check(ctx);
}

bool engine_needs_looking(bhvd_context *ctx)
{
    return ctx->staged_head || ctx->run.waits_for_gpu || run_links_need_looking(&ctx->run);
}

// ---------------------------------------------------------------------------------------- what a run asks of its owner

static bhvd_status on_frame(void *ctx, struct link *link, uint8_t type, struct bytes_reader payload)
{
    return negotiation_frame(ctx, link, type, payload);
}

static bool poll_engine(void *ctx, bool look_at_sockets) { return engine_poll(ctx, look_at_sockets); }

static void keep_alive(void *ctx) { heartbeat_look(ctx, true); }

static void look_around(void *ctx) { engine_look_around(ctx); }

static bool needs_looking(void *ctx) { return engine_needs_looking(ctx); }

static bool others_are_earlier(void *ctx) { return heartbeat_others_are_earlier(ctx); }

const struct run_duties engine_duties = {
    .on_frame = on_frame,
    .poll = poll_engine,
    .keep_alive = keep_alive,
    .look_around = look_around,
    .needs_looking = needs_looking,
    .others_are_earlier = others_are_earlier,
    .failed = context_failed,
};

// ------------------------------------------------------------------------------------------------------------ executions

static void end_execution(struct execution *execution, const struct bhvd_error *error)
{
    for (int i = 0; i < execution->count; i++) {
        operation_of(execution->works[i])->executing = false;
        operation_end(operation_of(execution->works[i]), error);
    }
    free(execution);
}

void engine_execute_next(bhvd_context *ctx)
{
    struct execution *execution = ctx->executions_head;
    struct bhvd_error error = {0};
    ctx->executions_head = execution->next;
    if (!ctx->executions_head)
        ctx->executions_tail = &ctx->executions_head;
    for (int i = 0; i < execution->count; i++) {
        operation_of(execution->works[i])->executing = true;
        timeline_operation_begin(ctx, operation_of(execution->works[i]));
    }
    ctx->counters.executions++;
    ctx->executing = execution->number;
    bhvd_status status = select_execute(ctx, execution, &error);
    ctx->executing = 0;
    if (ctx->run.failure.status)
        error = ctx->run.failure;
    for (int i = 0; i < execution->count; i++)
        timeline_operation_end(ctx, operation_of(execution->works[i]), status != BHVD_OK);
    end_execution(execution, status ? &error : NULL);
    if (!ctx->run.failure.status)
        relay_flush(ctx);                       // a process set was added or removed: that can answer others' requests
}
