#include "core/context/context.h"

#include <stdlib.h>
#include <unistd.h>

#include "base/status.h"
#include "collective/collective.h"
#include "core/execution/engine.h"
#include "core/api/progress.h"
#include "run/result_memory.h"
#include "transport/door.h"

// What the strings and the secret say is needed only while connecting, so they are not kept.
static void copy_options(bhvd_context *ctx, const struct bhvd_context_options *options)
{
    ctx->options = *options;
    ctx->options.secret = NULL;
    ctx->options.secret_size = 0;
    ctx->options.transport = ctx->options.rendezvous_host = ctx->options.scope = ctx->options.listen_host = NULL;
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
    bhvd_status status = process_set_add(ctx, ranks, size, &id, error);
    free(ranks);
    return !status;
}

// Everything but the connections and the thread.
static void context_free(bhvd_context *ctx)
{
    coordinator_fini(ctx);
    relay_fini(ctx);
    heartbeat_fini(ctx);
    meetings_fini(&ctx->meetings);
    response_cache_fini(&ctx->cache);
    process_set_table_fini(&ctx->sets);
    run_fini(&ctx->run);
    bytes_fini(&ctx->request_frame);
    timeline_fini(&ctx->timeline);
    log_fini(&ctx->log);
    free(ctx->stalled.ranks);
    free(ctx->names.buckets);
    pthread_mutex_destroy(&ctx->post_lock);
    pthread_mutex_destroy(&ctx->engine_lock);
    pthread_mutex_destroy(&ctx->sets_lock);
    pthread_mutex_destroy(&ctx->stalled.lock);
    free(ctx);
}

bhvd_status bhvd_context_create(const struct bhvd_context_options *options, bhvd_context **out,
                                struct bhvd_error *error)
{
    struct bhvd_error unused;
    if (!error)
        error = &unused;
    *out = NULL;
    bhvd_context *ctx = calloc(1, sizeof *ctx);
    if (!ctx)
        return error_set(error, BHVD_ERR_SYSTEM, "no memory for a context");
    pthread_mutex_init(&ctx->post_lock, NULL);
    pthread_mutex_init(&ctx->engine_lock, NULL);
    pthread_mutex_init(&ctx->sets_lock, NULL);
    pthread_mutex_init(&ctx->stalled.lock, NULL);
    log_init(&ctx->log);
    ctx->timeline.log = &ctx->log;
    ctx->posted_tail = &ctx->posted_head;
    ctx->executions_tail = &ctx->executions_head;
    ctx->cache.capacity = options->cache_capacity > 0 ? (size_t)options->cache_capacity : 0;
    run_init(&ctx->run, &engine_duties, ctx);
    enum allreduce_path path;
    int fanout = 0;
    bhvd_status status = allreduce_path_parse(options->allreduce_path, &path, error);
    ctx->run.allreduce_path = path;
    ctx->run.timeout_ms = options->timeout_ms;
    if (!status)
        status = tree_fanout(options, &fanout, error);
    if (!status)
        status = connections_init(&ctx->run.connections, options, tree_choose, error);
    if (status) {
        context_free(ctx);
        return status;
    }
    copy_options(ctx, options);
    ctx->options.negotiation_fanout = fanout;
    if (coordinator_init(ctx) || relay_init(ctx) || heartbeat_init(ctx) || !add_global_set(ctx, error))
        status = error_set(error, BHVD_ERR_SYSTEM, "no memory for a context of %d ranks", options->size);
    else
        status = progress_start(ctx, error);
    if (status) {
        connections_fini(&ctx->run.connections);
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
    result_memory_trim();
}

void bhvd_context_destroy(bhvd_context *ctx)
{
    if (!ctx)
        return;
    if (ctx->abandoned)
        return;                     // a thread of the parent's was anywhere in it: none of it can be told to be whole
    progress_stop(ctx);
    connections_fini(&ctx->run.connections);
    context_free(ctx);
}

void bhvd_context_after_fork(bhvd_context *ctx)
{
    // The threads did not come along, and a lock may have been held by one of them: fresh locks, and no engine.
    pthread_mutex_init(&ctx->post_lock, NULL);
    pthread_mutex_init(&ctx->engine_lock, NULL);
    pthread_mutex_init(&ctx->sets_lock, NULL);
    pthread_mutex_init(&ctx->stalled.lock, NULL);
    ctx->stalled.count = 0;
    run_after_fork(&ctx->run);
    log_after_fork(&ctx->log);
    ctx->abandoned = true;
    atomic_store(&ctx->closed, true);
    error_set(&ctx->closing, BHVD_ERR_SHUTDOWN,
              "this process was forked from a rank; only the parent takes part in the job");
    // The parent's death must be seen by its peers, so the child gives its copies of the descriptors back. Nothing is freed:
    // the engine may have been growing a buffer, so that what points to it here is what is no more.
    for (int rank = 0; rank < ctx->options.size; rank++)
        link_close(&ctx->run.connections.links[rank]);
    watch_close(&ctx->run.connections.watch);
    door_after_fork(ctx->run.connections.door);
    close(ctx->run.connections.bell.fd);
    ctx->run.connections.bell.fd = -1;
}

void bhvd_context_counters(bhvd_context *ctx, struct bhvd_counters *out)
{
    *out = (struct bhvd_counters){
        .operations = ctx->counters.operations,
        .executions = ctx->counters.executions,
        .payload_bytes_sent = ctx->run.payload_sent,
        .payload_bytes_received = ctx->run.payload_received,
        .cache_hits = ctx->counters.cache_hits,
        .cache_misses = ctx->counters.cache_misses,
        .coordinator_ns = ctx->counters.coordinator_ns,
        .negotiation_messages = ctx->counters.negotiation_messages,
        .shm_bytes_sent = ctx->run.payload_sent,
        .nccl_bytes = ctx->run.nccl_payload,
    };
    for (int rank = 0; rank < ctx->options.size && !ctx->abandoned; rank++) {
        const struct link *link = &ctx->run.connections.links[rank];
        uint64_t sent = link->payload_sent;
        out->payload_bytes_sent += sent;
        *link_medium(link, &out->shm_bytes_sent, &out->tcp_bytes_sent, &out->mpi_bytes_sent) += sent;
        out->payload_bytes_received += link->payload_received;
        out->control_bytes_sent += link->control_sent;
    }
}

void bhvd_context_sent(bhvd_context *ctx, int account, struct bhvd_sent *out)
{
    *out = (struct bhvd_sent){0};
    if (account >= 0 && account < BHVD_ACCOUNTS)
        *out = (struct bhvd_sent){ctx->accounts[account][0], ctx->accounts[account][1], ctx->accounts[account][2]};
}

void bhvd_context_network(bhvd_context *ctx, struct bhvd_measured_network *out)
{
    const uint64_t measured = ctx->measured;
    const double hop_s = (double)(measured >> 32) / 1e9, byte_s = (double)(uint32_t)measured / 1e12;
    *out = (struct bhvd_measured_network){hop_s, byte_s > 0 ? 1 / byte_s : 0};
}

int bhvd_context_waited_for(bhvd_context *ctx, struct bhvd_waited_for *out, int capacity)
{
    int size = ctx->options.rank == COORDINATOR && ctx->options.size > 1 ? ctx->options.size : 0;
    int count = size < capacity ? size : capacity;
    for (int rank = 0; rank < count; rank++)
        out[rank] = (struct bhvd_waited_for){ctx->coordinator.seen[rank].last_asked, ctx->coordinator.seen[rank].waited_ns};
    return count;
}

void bhvd_context_measure_coordinator(bhvd_context *ctx) { ctx->measures_coordinator = true; }

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
