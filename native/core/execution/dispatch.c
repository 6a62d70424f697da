#include "core/execution/dispatch.h"

#include "core/context/context.h"
#include "core/health/heartbeat.h"
#include "core/health/stall.h"
#include "core/negotiation/coordinator.h"
#include "core/negotiation/departure.h"
#include "core/negotiation/pairwise.h"
#include "core/negotiation/member.h"

static bhvd_status take_down(bhvd_context *ctx, enum frame_type type, struct bytes_reader payload)
{
    return type == FRAME_RESPONSE ? member_take_response(ctx, payload)
           : type == FRAME_STALE  ? member_take_stale(ctx, payload)
                                  : BHVD_ERR_SYSTEM;
}

const struct relay_receivers dispatch_receivers = {.up = coordinator_take_bundled, .down = take_down};

// Frames of negotiation proper.
static bhvd_status take_negotiation(bhvd_context *ctx, struct link *link, uint8_t type, struct bytes_reader payload)
{
    ctx->counters.negotiation_messages++;
    if (type == FRAME_UP)
        return relay_take_up(ctx, link, payload);
    if (type == FRAME_DOWN)
        return relay_take_down(ctx, link, payload);
    return type == FRAME_CLOSING ? departure_take_closing(ctx, link, payload) : BHVD_ERR_SYSTEM;
}

bhvd_status dispatch_frame(bhvd_context *ctx, struct link *link, uint8_t type, struct bytes_reader payload)
{
    if (link->state != LINK_OPEN)
        return BHVD_OK;                     // after its goodbye: it has ended all that this could be about
    if (type == FRAME_GOODBYE)
        return departure_take_goodbye(ctx, link, payload);
    if (type == FRAME_HEARTBEAT)
        return heartbeat_take(ctx, link, payload);
    if (type == FRAME_LATE)
        return stall_take_late(ctx, link, payload);
    if (type == FRAME_PAIRWISE_READY)
        return pairwise_take_ready(ctx, link, payload);
    if (type == FRAME_PAIRWISE_REVOKE)
        return pairwise_take_revoke(ctx, link, payload);
    return take_negotiation(ctx, link, type, payload);
}
