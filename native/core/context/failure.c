// How a context ends: it refuses posts (closed), or executions too (failed); operations in progress get the reason.
#include <stdlib.h>

#include "base/status.h"
#include "core/context/context.h"
#include "core/context/operation.h"

bool context_accepts(const bhvd_context *ctx, bhvd_kind kind)
{
    const struct bhvd_error *closing = &ctx->closing;
    const bool has_left = closing->status == BHVD_ERR_SHUTDOWN && closing->cause == BHVD_CAUSE_LEFT;
    return !closing->status || (has_left && (kind == BHVD_D_FP_S || kind == BHVD_D_LP_S));
}

static bool needs_coordinator(const bhvd_context *ctx, const struct bhvd_operation *op)
{
    const bool may_be_pairwise = context_accepts(ctx, op->coll.kind) && (op->is_pairwise || op->phase == OPERATION_POSTED);
    return op->phase < OPERATION_AGREED && !may_be_pairwise;
}

// Operations in progress, linked by `next`: all except those of the running execution, or only those that need the coordinator.
static struct bhvd_operation *take_in_flight(bhvd_context *ctx, bool unanswered_only)
{
    struct bhvd_operation *list = NULL;
    pthread_mutex_lock(&ctx->post_lock);
    struct bhvd_operation *lists[] = {fifo_take_all(&ctx->staged), fifo_take_all(&ctx->posted)};
    atomic_store(&ctx->posted_count, 0);
    for (int i = 0; i < 2 && unanswered_only; i++) {
        for (struct bhvd_operation *op = lists[i], *next; op; op = next) {
            next = op->next;
            if (needs_coordinator(ctx, op))
                continue;
            fifo_put(&ctx->posted, op, next);
            atomic_fetch_add(&ctx->posted_count, 1);
        }
    }
    for (struct table_node *node = NULL; (node = table_next(&ctx->names, node));) {
        struct bhvd_operation *op = TABLE_CONTAINER(node, struct bhvd_operation, by_name);
        if (unanswered_only ? needs_coordinator(ctx, op) : op->phase < OPERATION_EXECUTING) {
            op->next = list;
            list = op;
        }
    }
    pthread_mutex_unlock(&ctx->post_lock);
    return list;
}

// The first reason is kept: later ones are consequences. False if there was one.
static bool set_once(bhvd_context *ctx, struct bhvd_error *reason, const struct bhvd_error *error)
{
    pthread_mutex_lock(&ctx->post_lock);
    bool first = !reason->status;
    if (first)
        *reason = *error;
    pthread_mutex_unlock(&ctx->post_lock);
    return first;
}

void context_close(bhvd_context *ctx, const struct bhvd_error *error)
{
    if (set_once(ctx, &ctx->closing, error))
        operation_complete_list(take_in_flight(ctx, true), error);
}

void execution_discard(struct execution *execution)
{
    for (int i = 0; i < execution->count; i++)
        if (execution->colls[i]->is_proxy)
            operation_release(operation_of(execution->colls[i]));
    free(execution);
}

void context_abort(bhvd_context *ctx, const struct bhvd_error *error)
{
    pthread_mutex_lock(&ctx->post_lock);
    if (context_accepts(ctx, BHVD_D_FP_S))      // not closed, or only because ranks left
        ctx->closing = *error;
    pthread_mutex_unlock(&ctx->post_lock);
    log_write(ctx, error->status == BHVD_ERR_SHUTDOWN ? BHVD_LOG_DEBUG : BHVD_LOG_INFO, "no more operations are executed: %s",
              error->message);
    for (struct execution *execution; (execution = fifo_take(&ctx->executions, next));)
        execution_discard(execution);
    operation_complete_list(take_in_flight(ctx, false), error);
}
