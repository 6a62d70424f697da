// Public functions that read a context: counters, measurements, records, the timeline, process sets.
#include <string.h>

#include "base/status.h"
#include "core/context/context.h"
#include "core/message/frame.h"
#include "core/negotiation/coordinator.h"
#include "primitive/primitive.h"

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
