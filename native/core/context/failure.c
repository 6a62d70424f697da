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

static bool needs_coordinator(const struct bhvd_operation *op, uint32_t unused)
{
    (void)unused;
    const bool may_be_pairwise = context_accepts(op->ctx, op->coll.args.kind) && (op->is_pairwise || op->phase == OPERATION_POSTED);
    return op->phase < OPERATION_AGREED && !may_be_pairwise;
}

// All except those of the running execution.
static bool is_not_executing(const struct bhvd_operation *op, uint32_t unused)
{
    (void)unused;
    return op->phase < OPERATION_EXECUTING;
}

// Operations with a response are in the list of executions, and find that the set is gone when they start.
static bool awaits_response_in(const struct bhvd_operation *op, uint32_t process_set)
{
    return op->key.process_set == process_set && op->phase == OPERATION_REQUESTED;
}

// Ends, with this error, the operations in progress for which `ends` is true.
static void end_operations(bhvd_context *ctx, bool (*ends)(const struct bhvd_operation *op, uint32_t process_set),
                           uint32_t process_set, const struct bhvd_error *error)
{
    struct bhvd_operation *list = NULL;
    pthread_mutex_lock(&ctx->post_lock);
    struct bhvd_operation *lists[] = {fifo_take_all(&ctx->staged), fifo_take_all(&ctx->posted)};
    atomic_store(&ctx->posted_count, 0);
    for (int i = 0; i < 2; i++) {
        for (struct bhvd_operation *op = lists[i], *next; op; op = next) {
            next = op->next;
            if (ends(op, process_set))
                continue;
            fifo_put(&ctx->posted, op, next);
            atomic_fetch_add(&ctx->posted_count, 1);
        }
    }
    for (struct table_node *node = NULL; (node = table_next(&ctx->names, node));) {
        struct bhvd_operation *op = TABLE_CONTAINER(node, struct bhvd_operation, by_name);
        if (ends(op, process_set)) {
            op->next = list;
            list = op;
        }
    }
    pthread_mutex_unlock(&ctx->post_lock);
    for (struct bhvd_operation *next; list; list = next) {
        next = list->next;
        operation_complete(list, error);
    }
}

void context_close(bhvd_context *ctx, const struct bhvd_error *error)
{
    pthread_mutex_lock(&ctx->post_lock);
    const bool is_first = !ctx->closing.status;     // later ones are consequences
    if (is_first)
        ctx->closing = *error;
    pthread_mutex_unlock(&ctx->post_lock);
    if (is_first)
        end_operations(ctx, needs_coordinator, 0, error);
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
    end_operations(ctx, is_not_executing, 0, error);
}

void context_abort_set(bhvd_context *ctx, uint32_t process_set)
{
    struct bhvd_error error;
    error_set(&error, BHVD_ERR_UNSUPPORTED, "process set %u was removed while the operation was in flight", process_set);
    end_operations(ctx, awaits_response_in, process_set, &error);
}
