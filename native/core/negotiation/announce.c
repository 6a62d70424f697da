#include "core/negotiation/announce.h"

#include "core/context/context.h"
#include "core/negotiation/relay.h"

void announce_put_full(bhvd_context *ctx, struct bytes *out, enum item_tag tag, const struct bhvd_handle *op)
{
    ctx->counters.cache_misses++;
    bytes_put_u8(out, (uint8_t)tag);
    bytes_put_u32(out, (uint32_t)op->request.size);
    bytes_put(out, op->request.data, op->request.size);
}

bhvd_status announce(bhvd_context *ctx, const struct bytes *items)
{
    return items->failed ? context_fail(ctx, BHVD_ERR_SYSTEM, "no memory to negotiate an operation") : relay_announce(ctx, items);
}

bhvd_status announce_revoked(bhvd_context *ctx, struct bhvd_handle *op)
{
    struct bytes out = {0};
    announce_put_full(ctx, &out, ITEM_REVOKED, op);
    bhvd_status status = announce(ctx, &out);
    bytes_fini(&out);
    return status;
}
