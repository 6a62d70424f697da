// How a rank leaves the tree without taking answers with it: a relay, whose children become the coordinator's, and the
// coordinator itself. Every step is a message behind all earlier ones on the same way (docs/decisions/engine.md).
#include "core/context/context.h"
#include "core/negotiation/goodbye.h"
#include "core/negotiation/relay.h"
#include "core/negotiation/send.h"

void relay_leave(bhvd_context *ctx)
{
    const struct relay *relay = ctx->relay;
    const struct bytes nothing = {0};
    if (relay_is_free(ctx))
        return;
    for (int i = 0; i < relay->tree.child_count; i++)
        frame_send(ctx, relay->tree.children[i].rank, FRAME_LEAVING, &nothing, false);
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

bhvd_status relay_take_leaving(bhvd_context *ctx, struct link *link, struct bytes_reader payload)
{
    struct relay *relay = ctx->relay;
    struct bytes item = {0};
    if (link->rank != relay->parent || link->rank == COORDINATOR || relay->moving ||
        payload.at != payload.end)
        return BHVD_ERR_SYSTEM;
    bytes_put_u8(&item, ITEM_DETACHED);
    bhvd_status status = relay_announce(ctx, &item);
    bytes_fini(&item);
    if (!status)
        status = relay_flush(ctx);
    relay->moving = true;
    return status;
}

bhvd_status relay_take_detached(bhvd_context *ctx, int rank)
{
    struct tree_child *child = tree_child_towards(&ctx->relay->tree, rank);
    const struct bytes nothing = {0};
    if (!child || child->rank == rank)
        return BHVD_ERR_SYSTEM;
    bhvd_status status = relay_send_to(ctx, rank, FRAME_MOVED, &nothing);
    return status ? status : tree_adopt(&ctx->relay->tree, rank);
}

static bhvd_status take_unexpected(bhvd_context *ctx)
{
    struct bytes early = ctx->relay->unexpected;
    struct bytes_reader r = bytes_read(&early);
    bhvd_status status = BHVD_OK;
    ctx->relay->unexpected = (struct bytes){0};
    while (r.at < r.end && !status) {
        uint32_t size = bytes_take_u32(&r);
        const unsigned char *payload = bytes_take(&r, size);
        status = relay_take_down(ctx, &ctx->run.connections.links[COORDINATOR], (struct bytes_reader){payload, payload + size, false});
    }
    bytes_fini(&early);
    return status;
}

// The end of all answers: those below hear it behind them.
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

bhvd_status relay_take_moved(bhvd_context *ctx)
{
    struct relay *relay = ctx->relay;
    if (!relay->moving)
        return BHVD_ERR_SYSTEM;
    relay->moving = false;
    relay->parent = COORDINATOR;
    bhvd_status status = relay_flush(ctx);
    if (!status)
        status = take_unexpected(ctx);
    return status || !relay->coordinator_left ? status : end(ctx, bytes_read(&relay->last_words));
}

bhvd_status relay_take_goodbye(bhvd_context *ctx, struct bytes_reader reason)
{
    struct relay *relay = ctx->relay;
    if (relay->parent == COORDINATOR)
        return end(ctx, reason);
    relay->coordinator_left = true;
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
    if (relay->coordinator_left)
        return end(ctx, bytes_read(&relay->last_words));
    return run_blame(&ctx->run, BHVD_ERR_PEER_LOST, BHVD_CAUSE_LEFT, link->rank, "rank %d left the job while it still relayed "
                     "for rank %d; BAGUA_HVD_NEGOTIATION=star does without relays", link->rank, ctx->options.rank);
}
