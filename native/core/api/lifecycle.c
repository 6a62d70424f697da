#include "core/api/api.h"

#include <stdlib.h>

#include "base/status.h"
#include "collective/collectives.h"
#include "core/context/response_cache.h"
#include "core/engine/engine.h"
#include "core/health/health.h"
#include "core/negotiation/coordinator.h"
#include "core/negotiation/pairwise.h"
#include "transport/listener.h"

// Strings are needed only while connecting, so they are not kept.
static void forget_strings(bhvd_context *ctx)
{
    ctx->options.transport = ctx->options.listen_host = NULL;
    ctx->options.host_id = ctx->options.allreduce_path = ctx->options.negotiation = NULL;
}

static bool add_global_set(bhvd_context *ctx, struct bhvd_error *error)
{
    int id, size = ctx->options.size;
    int32_t *ranks = malloc((size_t)size * sizeof *ranks);
    if (!ranks)
        return false;
    for (int i = 0; i < size; i++)
        ranks[i] = i;
    bhvd_status status = process_set_add(&ctx->sets, &ctx->exec, ranks, size, false, &id, error);
    free(ranks);
    return !status;
}

static void init_locks(bhvd_context *ctx)
{
    pthread_mutex_init(&ctx->post_lock, NULL);
    pthread_mutex_init(&ctx->engine_lock, NULL);
    pthread_mutex_init(&ctx->sets_lock, NULL);
    pthread_mutex_init(&ctx->stalled.lock, NULL);
}

void context_free(bhvd_context *ctx)
{
    tasks_fini(&ctx->exec);
    coordinator_fini(ctx);
    relay_fini(ctx);
    free(ctx->heartbeat);
    pairwise_destroy(ctx->pairwise);
    response_cache_destroy(ctx->cache);
    process_set_table_fini(&ctx->sets);
    executor_fini(&ctx->exec);
    bytes_fini(&ctx->request_frame);
    timeline_close(&ctx->timeline);
    log_fini(&ctx->log);
    free(ctx->stalled.ranks);
    table_fini(&ctx->names);
    pthread_mutex_destroy(&ctx->post_lock);
    pthread_mutex_destroy(&ctx->engine_lock);
    pthread_mutex_destroy(&ctx->sets_lock);
    pthread_mutex_destroy(&ctx->stalled.lock);
    free(ctx);
}

bhvd_status context_new(const struct bhvd_context_options *options, bhvd_context **out, struct bhvd_error *error)
{
    bhvd_context *ctx = calloc(1, sizeof *ctx);
    if (!ctx)
        return error_set(error, BHVD_ERR_SYSTEM, "no memory for a context");
    ctx->options = *options;
    init_locks(ctx);
    log_init(&ctx->log);
    ctx->timeline.log = &ctx->log;
    executor_init(&ctx->exec, &engine_callbacks, ctx);
    ctx->exec.timeout_ms = options->timeout_ms;
    ctx->cache = response_cache_create(options->cache_capacity);
    ctx->pairwise = pairwise_create();
    enum allreduce_path path;
    bhvd_status status = allreduce_path_parse(options->allreduce_path, &path, error);
    if (!status)
        status = tree_fanout(options, &ctx->tree_fanout, error);
    if (!status && (!ctx->cache || !ctx->pairwise))
        status = error_set(error, BHVD_ERR_SYSTEM, "no memory for a context");
    if (status) {
        context_free(ctx);
        return status;
    }
    ctx->exec.allreduce_path = path;
    *out = ctx;
    return BHVD_OK;
}

bhvd_status context_prepare(bhvd_context *ctx)
{
    return coordinator_init(ctx) || relay_init(ctx, &engine_receivers) || heartbeat_init(ctx) ? BHVD_ERR_SYSTEM : BHVD_OK;
}

bhvd_status bhvd_context_create(const struct bhvd_context_options *options, bhvd_context **out,
                                struct bhvd_error *error)
{
    struct bhvd_error unused;
    if (!error)
        error = &unused;
    *out = NULL;
    bhvd_context *ctx;
    bhvd_status status = context_new(options, &ctx, error);
    if (status)
        return status;
    status = connections_init(&ctx->exec.connections, options, tree_choose, error);
    if (status) {
        context_free(ctx);
        return status;
    }
    forget_strings(ctx);
    if (context_prepare(ctx) || !add_global_set(ctx, error))
        status = error_set(error, BHVD_ERR_SYSTEM, "no memory for a context of %d ranks", options->size);
    else
        status = progress_start(ctx, error);
    if (status) {
        connections_fini(&ctx->exec.connections);
        context_free(ctx);
        return status;
    }
    *out = ctx;
    return BHVD_OK;
}

void bhvd_context_shutdown(bhvd_context *ctx)
{
    progress_stop(ctx);
    log_close(&ctx->log);
    block_pool_trim(&result_memory, CLOCK_NEVER);
}

void bhvd_context_destroy(bhvd_context *ctx)
{
    if (!ctx)
        return;
    if (ctx->abandoned)
        return;                     // a thread of the parent may have been changing any part of it
    progress_stop(ctx);
    connections_fini(&ctx->exec.connections);
    context_free(ctx);
}

void bhvd_context_after_fork(bhvd_context *ctx)
{
    // The threads exist only in the parent, and one of them may have held a lock: fresh locks, and no engine.
    init_locks(ctx);
    ctx->stalled.ranks = NULL;
    executor_after_fork(&ctx->exec);
    log_after_fork(&ctx->log);
    ctx->abandoned = true;
    atomic_store(&ctx->leaving, true);
    error_set(&ctx->closing, BHVD_ERR_SHUTDOWN,
              "this process was forked from a rank; only the parent takes part in the job: move the call there");
    // The child closes its copies of the descriptors, because peers must see the parent's death. Nothing is freed:
    // the engine may have been growing a buffer, so pointers here may be stale.
    for (int rank = 0; rank < ctx->options.size; rank++)
        link_close(&ctx->exec.connections.links[rank]);
    fd_close(&ctx->exec.connections.poller.fd);
    listener_after_fork(ctx->exec.connections.listener);
    fd_close(&ctx->exec.connections.doorbell.fd);
}

bhvd_status bhvd_context_status(bhvd_context *ctx, struct bhvd_error *error)
{
    pthread_mutex_lock(&ctx->post_lock);
    struct bhvd_error reason = ctx->closing;
    pthread_mutex_unlock(&ctx->post_lock);
    if (error)
        *error = reason;
    return reason.status;
}

bhvd_status bhvd_context_first_loss(bhvd_context *ctx, struct bhvd_error *error)
{
    pthread_mutex_lock(&ctx->post_lock);
    *error = ctx->first_loss.cause ? ctx->first_loss : ctx->closing;
    pthread_mutex_unlock(&ctx->post_lock);
    return error->status;
}
