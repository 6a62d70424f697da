#include "core/negotiation/goodbye.h"

#include "base/status.h"
#include "core/context/context.h"
#include "core/message/frame.h"
#include "core/message/reason.h"
#include "core/negotiation/coordinator_state.h"
#include "core/negotiation/relay.h"

bhvd_status goodbye_take_end(bhvd_context *ctx, struct bytes_reader r)
{
    struct bhvd_error reason;
    if (r.at == r.end)
        reason_left(&reason, COORDINATOR);
    else if (!reason_take(&r, bytes_take_u8(&r), ctx->options.size, &reason) || r.at != r.end)
        return BHVD_ERR_SYSTEM;
    ctx->failed_elsewhere = !ctx->run.failure.status && reason.status != BHVD_ERR_SHUTDOWN;
    if (reason.rank == ctx->options.rank && (reason.cause == BHVD_CAUSE_ENDED || reason.cause == BHVD_CAUSE_SILENT)) {
        const struct bhvd_error theirs = reason;
        error_set(&reason, theirs.status, "the other ranks go on without rank %d: %.900s", reason.rank, theirs.message);
        error_blame(&reason, theirs.cause, theirs.rank);
    }
    if (reason.status != BHVD_ERR_SHUTDOWN)
        return run_fail_with(&ctx->run, &reason);
    context_close(ctx, &reason);
    return BHVD_OK;
}

// Why this rank leaves, if somebody else has to know: a status and a sentence that names a rank. Else nothing.
static void put_reason(const bhvd_context *ctx, struct bytes *out)
{
    struct bhvd_error error = ctx->run.failure;
    bool failed = error.status && error.status != BHVD_ERR_SHUTDOWN;
    if (failed && !ctx->failed_elsewhere && error.status != BHVD_ERR_PEER_LOST) {
        error_set(&error, error.status, "rank %d failed: %.900s", ctx->options.rank, ctx->run.failure.message);
        error_blame(&error, BHVD_CAUSE_FAILED, ctx->options.rank);
    } else if (!failed && !error.status && ctx->closing.status) {
        error = ctx->closing;
    } else if (!failed && ctx->coordinator->left_count) {
        reason_left(&error, ctx->coordinator->first_left);
    } else if (!failed) {
        return;
    }
    bytes_put_u8(out, (uint8_t)error.status);
    reason_put(out, &error);
}

void goodbye_say(bhvd_context *ctx)
{
    struct bytes reason = {0};
    if (ctx->said_goodbye)
        return;
    ctx->said_goodbye = true;
    relay_flush(ctx);                       // what a child was promised comes before
    put_reason(ctx, &reason);
    for (int rank = 0; rank < ctx->options.size; rank++) {
        struct link *link = &ctx->run.connections.links[rank];
        if (rank != ctx->options.rank && link->state == LINK_OPEN)
            link_send_frame(link, FRAME_GOODBYE, &reason, false);
    }
    bytes_fini(&reason);
}
