// How ranks leave a tree of relays without losing answers. A relay stays until its children have left. When the coordinator leaves, its
// CLOSING reaches each rank behind all its responses.
#include "base/clock.h"
#include "core/context/context.h"
#include "core/negotiation/goodbye.h"
#include "core/negotiation/pairwise.h"
#include "core/negotiation/relay.h"
#include "core/negotiation/send.h"

bhvd_status relay_leave(bhvd_context *ctx)
{
    struct bytes item = {0};
    if (relay_is_free(ctx))
        return BHVD_OK;                 // its goodbye says as much
    pairwise_revoke_all(ctx);
    bytes_put_u8(&item, ITEM_LEFT);
    bhvd_status status = relay_announce(ctx, &item);
    bytes_fini(&item);
    return status;
}

bool relay_is_free(const bhvd_context *ctx)
{
    const struct relay *relay = ctx->relay;
    // After a failure, or the coordinator's goodbye, nothing is relayed; its own goodbye is that for all.
    if (relay->parent < 0 || ctx->run.failure.status || ctx->closing.status)
        return true;
    for (int i = 0; i < relay->tree.child_count; i++) {
        if (ctx->run.connections.links[relay->tree.children[i].rank].state == LINK_OPEN)
            return false;
    }
    return true;
}

// The end of all responses: those below hear it behind them.
static bhvd_status end(bhvd_context *ctx, struct bytes_reader reason)
{
    struct bytes words = {0};
    bytes_put(&words, reason.at, (size_t)(reason.end - reason.at));
    bhvd_status status = relay_flush(ctx);
    for (int i = 0; i < ctx->relay->tree.child_count && !status; i++)
        status = frame_send(ctx, ctx->relay->tree.children[i].rank, FRAME_CLOSING, &words, false);
    bytes_fini(&words);
    return status ? status : goodbye_take_end(ctx, reason);
}

bhvd_status relay_take_goodbye(bhvd_context *ctx, struct bytes_reader reason)
{
    struct relay *relay = ctx->relay;
    if (relay->parent == COORDINATOR)
        return end(ctx, reason);
    relay->closing_by_ns = clock_deadline_ns(ctx->options.heartbeat_timeout_ms > 0 ? ctx->options.heartbeat_timeout_ms : ctx->options.timeout_ms);
    relay->last_words.size = 0;
    bytes_put(&relay->last_words, reason.at, (size_t)(reason.end - reason.at));
    return relay->last_words.failed ? BHVD_ERR_SYSTEM : BHVD_OK;
}

bhvd_status relay_take_closing(bhvd_context *ctx, struct link *link, struct bytes_reader reason)
{
    const struct relay *relay = ctx->relay;
    if (link->rank != relay->parent || link->rank == COORDINATOR || ctx->options.rank == COORDINATOR)
        return BHVD_ERR_SYSTEM;
    return end(ctx, reason);
}

bhvd_status relay_take_parents_goodbye(bhvd_context *ctx, const struct link *link)
{
    const struct relay *relay = ctx->relay;
    if (link->rank != relay->parent || ctx->closing.status)
        return BHVD_OK;
    if (relay->closing_by_ns)
        return end(ctx, bytes_read(&relay->last_words));
    return run_blame(&ctx->run, BHVD_ERR_PEER_LOST, BHVD_CAUSE_LEFT, link->rank, "rank %d left the job while it still relayed "
                     "for rank %d; BAGUA_HVD_NEGOTIATION=star does without relays", link->rank, ctx->options.rank);
}

void relay_look(bhvd_context *ctx, int64_t now_ns)
{
    const struct relay *relay = ctx->relay;
    if (relay->closing_by_ns && now_ns >= relay->closing_by_ns && !ctx->closing.status)
        end(ctx, bytes_read(&relay->last_words));
}
