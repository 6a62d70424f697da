#include "core/context/operation.h"

#include <pthread.h>
#include <stdlib.h>

#include "base/clock.h"
#include "base/status.h"
#include "base/thread.h"
#include "core/context/context.h"
#include "core/context/response_cache.h"
#include "gpu/staged_codes.h"
#include "gpu/staging.h"

// --------------------------------------------------------------------------------------------------------- completions

// A list of numbers, to which each operation adds its own when it ends, so that one thread can wait for many operations. Any number
// of threads add to a list and take from it. A completion that is in the list or will be put into it holds a reference to it, so
// that the list may be destroyed while operations are in progress.
struct completion {
    struct completion *next;
    bhvd_completions *list;
    int64_t number;
};

struct bhvd_completions {
    atomic_int references;
    pthread_mutex_t lock;
    _Atomic uint32_t added;             // numbers added; the sleepers' futex
    int sleepers;                       // threads that wait until the list is not empty
    struct FIFO(struct completion) ended;
};

bhvd_completions *bhvd_completions_create(void)
{
    bhvd_completions *list = calloc(1, sizeof *list);
    if (!list)
        return NULL;
    atomic_init(&list->references, 1);
    pthread_mutex_init(&list->lock, NULL);
    return list;
}

static void release(bhvd_completions *list)
{
    if (atomic_fetch_sub(&list->references, 1) != 1)
        return;
    for (struct completion *completion; (completion = fifo_take(&list->ended, next));)
        free(completion);
    pthread_mutex_destroy(&list->lock);
    free(list);
}

// Call after the operation has completed: puts its number into its list, if it has one.
static void completions_signal(struct bhvd_operation *op)
{
    struct completion *completion = atomic_load(&op->completion) ? atomic_exchange(&op->completion, NULL) : NULL;  // usually none
    if (!completion)
        return;
    bhvd_completions *list = completion->list;
    pthread_mutex_lock(&list->lock);
    fifo_put(&list->ended, completion, next);
    list->added++;
    const bool has_sleepers = list->sleepers;
    pthread_mutex_unlock(&list->lock);
    if (has_sleepers)
        futex_wake_all(&list->added);
    release(list);
}

bhvd_status bhvd_completions_add(bhvd_completions *list, bhvd_handle *op, int64_t number)
{
    struct completion *none = NULL, *completion = malloc(sizeof *completion);
    if (!completion)
        return BHVD_ERR_SYSTEM;
    *completion = (struct completion){NULL, list, number};
    atomic_fetch_add(&list->references, 1);
    if (!atomic_compare_exchange_strong(&op->completion, &none, completion)) {
        free(completion);
        release(list);
        return BHVD_ERR_ARGUMENT;
    }
    // Either this thread or the thread that ends the operation sees the other's mark.
    if (operation_is_complete(op))
        completions_signal(op);
    return BHVD_OK;
}

int64_t bhvd_completions_next(bhvd_completions *list, int timeout_ms)
{
    const int64_t deadline_ns = clock_deadline_ns(timeout_ms);
    pthread_mutex_lock(&list->lock);
    list->sleepers++;
    while (!list->ended.head && clock_now_ns() < deadline_ns) {
        const uint32_t added = list->added;
        pthread_mutex_unlock(&list->lock);
        futex_wait(&list->added, added, deadline_ns);
        pthread_mutex_lock(&list->lock);
    }
    list->sleepers--;
    struct completion *completion = fifo_take(&list->ended, next);
    pthread_mutex_unlock(&list->lock);
    int64_t number = completion ? completion->number : -1;
    free(completion);
    return number;
}

void bhvd_completions_destroy(bhvd_completions *list)
{
    if (list)
        release(list);
}

// ---------------------------------------------------------------------------------------------------------- operations

static bool operation_has_key(const struct table_node *node, const void *arg)
{
    return operation_key_equals(&TABLE_CONTAINER(node, struct bhvd_operation, by_name)->key, arg);
}

struct bhvd_operation *operation_find_locked(bhvd_context *ctx, const struct operation_key *key)
{
    struct table_node *node = table_find(&ctx->names, operation_hash(key), operation_has_key, key);
    return node ? TABLE_CONTAINER(node, struct bhvd_operation, by_name) : NULL;
}

struct bhvd_operation *operation_find(bhvd_context *ctx, const struct operation_key *key)
{
    pthread_mutex_lock(&ctx->post_lock);
    struct bhvd_operation *op = operation_find_locked(ctx, key);
    pthread_mutex_unlock(&ctx->post_lock);
    return op;
}

void operation_complete(struct bhvd_operation *op, const struct bhvd_error *error)
{
    bhvd_context *ctx = op->ctx;
    if (error)
        op->error = *error;
    else if (op->coll.staging && op->coll.staging->codes && !op->coll.staging->by_nccl)
        staged_codes_end(&op->coll, &op->error);
    else if (op->coll.staging)
        staging_end(&op->coll, &op->error);
    lru_unpin(&op->cached);
    if (op->coll.is_proxy) {
        operation_release(op);
        return;
    }
    pthread_mutex_lock(&ctx->post_lock);
    table_remove(&ctx->names, &op->by_name);
    if (op->error.cause && !ctx->first_loss.cause)
        ctx->first_loss = op->error;
    pthread_mutex_unlock(&ctx->post_lock);
    ctx->counters.operations++;
    atomic_fetch_sub(&ctx->outstanding, 1);
    if (atomic_exchange(&op->state, OPERATION_COMPLETE) == OPERATION_RUNS_AWAITED)
        futex_wake_all(&op->state);
    completions_signal(op);
    operation_release(op);
}

void operation_sleep(struct bhvd_operation *op, int64_t deadline_ns)
{
    uint32_t runs = OPERATION_RUNS;
    atomic_compare_exchange_strong(&op->state, &runs, OPERATION_RUNS_AWAITED);
    futex_wait(&op->state, OPERATION_RUNS_AWAITED, deadline_ns);
}

static bool awaits_response(const struct bhvd_operation *op) { return op->phase == OPERATION_REQUESTED && !op->is_pairwise; }

bool operation_awaits_response(bhvd_context *ctx)
{
    bool found = false;
    pthread_mutex_lock(&ctx->post_lock);
    for (struct table_node *node = NULL; !found && (node = table_next(&ctx->names, node));)
        found = awaits_response(TABLE_CONTAINER(node, struct bhvd_operation, by_name));
    pthread_mutex_unlock(&ctx->post_lock);
    return found;
}

void operation_release(struct bhvd_operation *op)
{
    if (!op || atomic_fetch_sub(&op->references, 1) != 1)
        return;
    for (size_t t = 0; t < op->coll.args.tensor_count; t++)
        block_pool_release(&result_memory, op->coll.tensors[t].result);
    staged_codes_destroy(&op->coll);
    staging_destroy(&op->coll);
    bytes_fini(&op->request);
    free((void *)op->coll.args.splits);
    free(op->response_numbers_owned);
    free(op->inline_sum);
    free(op->received_splits);
    free(op);
}
