#include "core/negotiation/departure.h"

#include "base/clock.h"
#include "base/status.h"
#include "core/context/context.h"
#include "core/message/frame.h"
#include "core/negotiation/coordinator.h"
#include "core/negotiation/pairwise.h"
#include "core/negotiation/relay.h"

bhvd_status departure_begin(bhvd_context *ctx)
{
    struct bytes item = {0};
    if (departure_is_free(ctx))
        return BHVD_OK;                 // nobody relies on this rank: the goodbye is all that others need
    bhvd_status status = pairwise_revoke(ctx, NULL, ctx->options.rank);
    bytes_put_u8(&item, ITEM_LEFT);
    status = status ? status : relay_send_requests(ctx, &item);
    bytes_fini(&item);
    return status;
}

bool departure_is_free(bhvd_context *ctx)
{
    const struct relay *relay = ctx->relay;
    // After a failure, or the coordinator's goodbye, nothing gets a response or is relayed; its own goodbye says so for all ranks.
    if (relay->tree.parent < 0 || ctx->exec.failure.status || ctx->closing.status)
        return true;
    for (int i = 0; i < relay->tree.child_count; i++) {
        if (ctx->exec.connections.links[relay->tree.children[i].rank].state == LINK_OPEN)
            return false;
    }
    return !operation_awaits_response(ctx);
}

// The reason for leaving, if other ranks need it: a status and a message that names a rank. Otherwise nothing.
static void put_reason(const bhvd_context *ctx, struct bytes *out)
{
    struct bhvd_error error = ctx->exec.failure;
    bool failed = error.status && error.status != BHVD_ERR_SHUTDOWN;
    if (failed && !ctx->failed_elsewhere && error.status != BHVD_ERR_PEER_LOST) {
        error_set(&error, error.status, "rank %d failed: %.900s", ctx->options.rank, ctx->exec.failure.message);
        error_blame(&error, BHVD_CAUSE_FAILED, ctx->options.rank);
    } else if (!failed && !error.status && ctx->closing.status) {
        error = ctx->closing;
    } else if (!failed && !coordinator_any_departed(ctx, process_set_get(&ctx->sets, 0), &error)) {
        return;
    }
    bytes_put_u8(out, (uint8_t)error.status);
    reason_put(out, &error);
}

void departure_send_goodbye(bhvd_context *ctx)
{
    struct bytes reason = {0};
    if (ctx->goodbye_sent)
        return;
    ctx->goodbye_sent = true;
    relay_flush(ctx);                       // promised responses to children come first
    put_reason(ctx, &reason);
    for (int rank = 0; rank < ctx->options.size; rank++) {
        struct link *link = &ctx->exec.connections.links[rank];
        if (rank != ctx->options.rank && link->state == LINK_OPEN)
            link_send_frame(link, FRAME_GOODBYE, &reason, false);
    }
    bytes_fini(&reason);
}

// ------------------------------------------------------------------------------------------- goodbyes of other ranks

// A goodbye that ends this rank's work: the coordinator's, or one that reports a failure.
static bhvd_status on_end(bhvd_context *ctx, struct bytes_reader r)
{
    struct bhvd_error reason;
    if (r.at == r.end)
        reason_departed(&reason, COORDINATOR);
    else if (!reason_take(&r, bytes_take_u8(&r), ctx->options.size, &reason) || r.at != r.end)
        return BHVD_ERR_PROTOCOL;
    ctx->failed_elsewhere = !ctx->exec.failure.status && reason.status != BHVD_ERR_SHUTDOWN;
    if (reason.rank == ctx->options.rank && (reason.cause == BHVD_CAUSE_ENDED || reason.cause == BHVD_CAUSE_SILENT)) {
        const struct bhvd_error theirs = reason;
        error_set(&reason, theirs.status, "the other ranks go on without rank %d: %.900s", reason.rank, theirs.message);
        error_blame(&reason, theirs.cause, theirs.rank);
    }
    if (reason.status != BHVD_ERR_SHUTDOWN)
        return executor_fail_with(&ctx->exec, &reason);
    context_close(ctx, &reason);
    return BHVD_OK;
}

// The end of all responses: ranks below get it after the responses.
static bhvd_status close_all(bhvd_context *ctx, struct bytes_reader reason)
{
    struct bytes words = {0};
    bytes_put(&words, reason.at, (size_t)(reason.end - reason.at));
    bhvd_status status = relay_flush(ctx);
    for (int i = 0; i < ctx->relay->tree.child_count && !status; i++)
        status = frame_send(ctx, ctx->relay->tree.children[i].rank, FRAME_CLOSING, &words, false);
    bytes_fini(&words);
    return status ? status : on_end(ctx, reason);
}

// The coordinator left, and reports it to all: its children pass on the end of responses; other ranks wait for their parent's.
static bhvd_status on_coordinators_goodbye(bhvd_context *ctx, struct bytes_reader reason)
{
    struct relay *relay = ctx->relay;
    const int heartbeat_ms = ctx->options.heartbeat_timeout_ms;
    if (relay->tree.parent == COORDINATOR)
        return close_all(ctx, reason);
    relay->closing_by_ns = clock_deadline_ns(heartbeat_ms > 0 ? heartbeat_ms : ctx->options.timeout_ms);
    relay->closing_reason.size = 0;
    bytes_put(&relay->closing_reason, reason.at, (size_t)(reason.end - reason.at));
    return relay->closing_reason.failed ? BHVD_ERR_SYSTEM : BHVD_OK;
}

bhvd_status departure_on_closing(bhvd_context *ctx, struct link *link, struct bytes_reader reason)
{
    const struct relay *relay = ctx->relay;
    if (link->rank != relay->tree.parent || link->rank == COORDINATOR || ctx->options.rank == COORDINATOR)
        return BHVD_ERR_PROTOCOL;
    return close_all(ctx, reason);
}

// Another rank left: a failure if this rank still needed it as a relay.
static bhvd_status on_members_goodbye(bhvd_context *ctx, const struct link *link)
{
    const struct relay *relay = ctx->relay;
    if (link->rank != relay->tree.parent || ctx->closing.status)
        return BHVD_OK;
    if (relay->closing_by_ns)
        return close_all(ctx, bytes_read(&relay->closing_reason));
    return executor_blame(&ctx->exec, BHVD_ERR_PEER_LOST, BHVD_CAUSE_LEFT, link->rank,
                          "rank %d left the job while it was still a relay for rank %d; BAGUA_HVD_NEGOTIATION=star uses no "
                          "relays", link->rank, ctx->options.rank);
}

bhvd_status departure_on_goodbye(bhvd_context *ctx, struct link *link, struct bytes_reader r)
{
    bool is_failure = r.at < r.end && *r.at != BHVD_ERR_SHUTDOWN;
    bhvd_status status = BHVD_OK;
    link->state = LINK_DEPARTED;
    if (link->rank == COORDINATOR && !is_failure)
        status = on_coordinators_goodbye(ctx, r);
    else if (link->rank == COORDINATOR || r.at < r.end)
        status = on_end(ctx, r);
    else
        status = on_members_goodbye(ctx, link);
    if (!status)
        pairwise_on_goodbye(ctx, link->rank);
    if (!status && ctx->options.rank == COORDINATOR)
        coordinator_on_goodbye(ctx, link->rank);
    return status;
}

void departure_check_timer(bhvd_context *ctx, int64_t now_ns)
{
    const struct relay *relay = ctx->relay;
    if (relay->closing_by_ns && now_ns >= relay->closing_by_ns && !ctx->closing.status &&
        close_all(ctx, bytes_read(&relay->closing_reason)) == BHVD_ERR_PROTOCOL)
        executor_fail_protocol(&ctx->exec, COORDINATOR);
}
