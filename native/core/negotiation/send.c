#include "core/negotiation/send.h"

#include "core/context/context.h"

bhvd_status frame_send(bhvd_context *ctx, int rank, enum frame_type type, const struct bytes *payload, bool lazy)
{
    struct link *link = &ctx->run.connections.links[rank];
    if (link->state != LINK_OPEN)
        return BHVD_OK;                     // it left: it needs no response, and its goodbye ended what it could be asked
    ctx->counters.negotiation_messages++;
    bhvd_status status = link_send_frame(link, type, payload, lazy);
    // A connection that is broken is noticed where it is read, after the goodbye that may explain it.
    if (status == BHVD_ERR_PEER_LOST)
        return BHVD_OK;
    return status ? run_fail(&ctx->run, status, "no memory for a message of %zu bytes to rank %d, or one that is too long",
                                       payload->size, rank) : BHVD_OK;
}
