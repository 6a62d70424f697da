// Public functions on a context: its life, and what can be read from it: counters, measurements, records, the timeline, process
// sets.
#include "core/api/api.h"

#include <stdlib.h>
#include <string.h>

#include "base/status.h"
#include "collective/collectives.h"
#include "core/context/context.h"
#include "core/context/response_cache.h"
#include "core/engine/engine.h"
#include "core/health/health.h"
#include "core/negotiation/coordinator.h"
#include "core/negotiation/pairwise.h"
#include "primitive/primitive.h"
#include "transport/listener.h"

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

static void context_free(bhvd_context *ctx)
{
    tasks_fini(&ctx->exec);
    coordinator_fini(ctx);
    relay_fini(ctx);
    free(ctx->heartbeat);
    pairwise_destroy(ctx->pairwise);
    response_cache_fini(&ctx->cache);
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
    response_cache_init(&ctx->cache, options->cache_capacity);
    ctx->pairwise = pairwise_create();
    enum allreduce_path path;
    bhvd_status status = allreduce_path_parse(options->allreduce_path, &path, error);
    if (!status)
        status = tree_fanout(options, &ctx->tree_fanout, error);
    if (!status && !ctx->pairwise)
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
    // Strings are needed only while connecting, so they are not kept.
    ctx->options.transport = ctx->options.listen_host = NULL;
    ctx->options.host_id = ctx->options.allreduce_path = ctx->options.negotiation = NULL;
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

// --------------------------------------------------------------------------------------------------------- observation

void bhvd_context_counters(bhvd_context *ctx, struct bhvd_counters *out)
{
    *out = (struct bhvd_counters){
        .operations = ctx->counters.operations,
        .executions = ctx->counters.executions,
        .payload_bytes_sent = ctx->exec.payload_sent,
        .payload_bytes_received = ctx->exec.payload_received,
        .cache_hits = ctx->counters.cache_hits,
        .cache_misses = ctx->counters.cache_misses,
        .coordinator_ns = ctx->counters.coordinator_ns,
        .negotiation_messages = ctx->counters.negotiation_messages,
        .shm_bytes_sent = ctx->exec.payload_sent,
        .nccl_bytes = ctx->exec.nccl_payload,
    };
    for (int rank = 0; rank < ctx->options.size && !ctx->abandoned; rank++) {
        const struct link *link = &ctx->exec.connections.links[rank];
        uint64_t sent = link->payload_sent;
        out->payload_bytes_sent += sent;
        *link_medium(link, &out->shm_bytes_sent, &out->tcp_bytes_sent, &out->mpi_bytes_sent) += sent;
        out->payload_bytes_received += link->payload_received;
        out->control_bytes_sent += link->control_sent;
    }
}

void bhvd_context_sent(bhvd_context *ctx, int byte_counter, struct bhvd_sent *out)
{
    *out = (struct bhvd_sent){0};
    if (byte_counter < 0 || byte_counter >= BHVD_BYTE_COUNTERS)
        return;
    const _Atomic uint64_t *bytes = ctx->byte_counters[byte_counter];
    *out = (struct bhvd_sent){bytes[0], bytes[1], bytes[2]};
}

void bhvd_context_network(bhvd_context *ctx, struct bhvd_measured_network *out)
{
    const uint64_t measured = ctx->measured;
    const double alpha_s = (double)(measured >> 32) / 1e9, beta_s = (double)(uint32_t)measured / 1e12;
    *out = (struct bhvd_measured_network){alpha_s, beta_s > 0 ? 1 / beta_s : 0};
}

int bhvd_context_waited_for(bhvd_context *ctx, struct bhvd_waited_for *out, int capacity)
{
    int size = ctx->options.rank == COORDINATOR && ctx->options.size > 1 ? ctx->options.size : 0;
    int count = size < capacity ? size : capacity;
    for (int rank = 0; rank < count; rank++)
        out[rank] = (struct bhvd_waited_for){ctx->coordinator->requesters[rank].requested_last,
                                             ctx->coordinator->requesters[rank].waited_ns};
    return count;
}

void bhvd_context_measure_coordinator(bhvd_context *ctx) { ctx->measures_coordinator = true; }

void bhvd_context_await_state(bhvd_context *ctx, int awaits) { ctx->awaits_state = awaits != 0; }

bhvd_status bhvd_timeline_start(bhvd_context *ctx, const char *path, int mark_cycles, struct bhvd_error *error)
{
    struct timeline *t = &ctx->timeline;
    bhvd_status status = BHVD_OK;
    error_clear(error);
    pthread_mutex_lock(&ctx->engine_lock);
    if (ctx->options.rank == 0 && !(t->open && t->path && strcmp(t->path, path) == 0))
        status = timeline_open(t, path, mark_cycles != 0, error);
    pthread_mutex_unlock(&ctx->engine_lock);
    return status;
}

void bhvd_timeline_stop(bhvd_context *ctx)
{
    pthread_mutex_lock(&ctx->engine_lock);
    timeline_close(&ctx->timeline);
    pthread_mutex_unlock(&ctx->engine_lock);
}

int bhvd_context_next_record(bhvd_context *ctx, int timeout_ms, struct bhvd_record **out)
{
    return log_next(&ctx->log, timeout_ms, out);
}

// The properties of a set; {-1, -2, -1} if it does not exist.
struct numbers {
    int size, rank, hosts;              // hosts: -1 if this rank is not a member
};

static struct numbers numbers_of(bhvd_context *ctx, int id)
{
    struct numbers numbers = {-1, -2, -1};
    pthread_mutex_lock(&ctx->sets_lock);
    const struct process_set *set = process_set_get(&ctx->sets, (uint32_t)id);
    if (set)
        numbers = (struct numbers){set->group.size, set->group.rank, set->group.rank >= 0 ? primitive_hosts(&set->group) : -1};
    pthread_mutex_unlock(&ctx->sets_lock);
    return numbers;
}

int bhvd_process_set_size(bhvd_context *ctx, int id) { return numbers_of(ctx, id).size; }
int bhvd_process_set_rank(bhvd_context *ctx, int id) { return numbers_of(ctx, id).rank; }
int bhvd_process_set_hosts(bhvd_context *ctx, int id) { return numbers_of(ctx, id).hosts; }
