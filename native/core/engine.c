#include "core/engine.h"

#include <poll.h>
#include <stdlib.h>

#include "base/clock.h"
#include "base/status.h"
#include "collective/collective.h"
#include "collective/nccl.h"
#include "device/staging.h"

static bhvd_status on_frame(void *arg, struct link *link, uint8_t type, struct bytes_reader payload)
{
    return negotiation_frame(arg, link, type, payload);
}

static void fail_link(bhvd_context *ctx, const struct link *link, bhvd_status status)
{
    if (status == BHVD_ERR_PEER_LOST)
        context_fail(ctx, status, "rank %d was lost: its process ended or became unreachable without leaving the job",
                     link->rank);
    else
        context_fail_protocol(ctx, link->rank);
}

static void advance_link(bhvd_context *ctx, struct link *link, bool look_at_sockets, bool *progress)
{
    bool moved = false;
    bool has_output = link->control_out.size || traffic_is_pending(&link->sends);
    bool by_socket = !link->control.ops->readable;
    if (!has_output && !(by_socket && look_at_sockets) && !link_ready(link) && link->state == LINK_OPEN) {
        link_needs_looking(link);           // which looks
        return;
    }
    uint64_t payload_before = link->payload_sent + link->payload_received;
    bhvd_status status = link_advance(link, on_frame, ctx, &moved);
    uint64_t payload = link->payload_sent + link->payload_received - payload_before;
    ctx->messages_moved += payload;
    if (status) {
        fail_link(ctx, link, status);
    } else if (link->state == LINK_LEFT && !moved &&
               (traffic_is_pending(&link->sends) || (traffic_is_pending(&link->receives) && !by_socket))) {
        context_fail(ctx, BHVD_ERR_PEER_LOST, "rank %d left the job while an operation still needed it", link->rank);
    }
    *progress |= moved;
    if (payload && by_socket)
        atomic_fetch_add_explicit(&ctx->connections.bell.word->activity, 1, memory_order_relaxed);
}

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
            const int is_ready = op->staging ? staging_is_ready(op->staging, &error) : 1;
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
    if (posted && negotiation_request(ctx, posted) && !ctx->failure.status)
        context_fail(ctx, BHVD_ERR_SYSTEM, "an operation could not be announced; this process may be out of memory");
    return posted != NULL;
}

bool engine_poll(bhvd_context *ctx, bool look_at_sockets)
{
    bool progress = false;
    if (ctx->failure.status)
        return false;
    progress = take_posted(ctx);
    for (int rank = 0; rank < ctx->options.size && !ctx->failure.status; rank++) {
        struct link *link = &ctx->connections.links[rank];
        if (rank != ctx->options.rank)
            advance_link(ctx, link, look_at_sockets, &progress);
    }
    if (!ctx->failure.status && ctx->coordinator.ready_head) {
        if (coordinator_respond(ctx) && !ctx->failure.status)
            context_fail(ctx, BHVD_ERR_SYSTEM, "an operation could not be answered; this process may be out of memory");
        progress = true;
    }
    if (!ctx->failure.status)
        relay_flush(ctx);
    heartbeat_look(ctx, false);
    return progress;
}

// A liveness socket says something only when its peer is gone.
void engine_look_at_liveness(bhvd_context *ctx)
{
    for (int rank = 0; rank < ctx->options.size && !ctx->failure.status; rank++) {
        struct link *link = &ctx->connections.links[rank];
        if (rank == ctx->options.rank || link->state != LINK_OPEN || link->liveness_fd < 0)
            continue;
        struct pollfd fd = {.fd = link->liveness_fd, .events = POLLIN | POLLRDHUP};
        bool progress = false;
        if (poll(&fd, 1, 0) > 0) {
            link_hang_up(link, on_frame, ctx, &progress);
            if (link->state == LINK_LOST)
                fail_link(ctx, link, BHVD_ERR_PEER_LOST);
        }
    }
}

void engine_look_around(bhvd_context *ctx)
{
    heartbeat_look(ctx, true);
    nccl_look(ctx);
    stall_check(ctx);
}

bool engine_needs_looking(bhvd_context *ctx)
{
    if (ctx->staged_head || ctx->waits_for_gpu)
        return true;
    for (int rank = 0; rank < ctx->options.size && !ctx->failure.status; rank++) {
        if (rank != ctx->options.rank && link_needs_looking(&ctx->connections.links[rank]))
            return true;
    }
    return false;
}

static void end_execution(struct execution *execution, const struct bhvd_error *error)
{
    for (int i = 0; i < execution->count; i++) {
        execution->operations[i]->executing = false;
        operation_end(execution->operations[i], error);
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
        execution->operations[i]->executing = true;
        timeline_operation_begin(ctx, execution->operations[i]);
    }
    ctx->counters.executions++;
    ctx->executing = execution->number;
    bhvd_status status = collective_execute(ctx, execution, &error);
    ctx->executing = 0;
    if (ctx->failure.status)
        error = ctx->failure;
    for (int i = 0; i < execution->count; i++)
        timeline_operation_end(ctx, execution->operations[i], status != BHVD_OK);
    end_execution(execution, status ? &error : NULL);
    if (!ctx->failure.status)
        relay_flush(ctx);                       // a process set was added or removed: that can answer others' requests
}
