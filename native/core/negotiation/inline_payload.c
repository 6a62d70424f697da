#include "core/negotiation/inline_payload.h"

#include <stdlib.h>
#include <string.h>

#include "base/status.h"
#include "core/context/context.h"
#include "core/context/response_cache.h"
#include "core/message/frame.h"
#include "core/negotiation/relay.h"

static bool collective_is_small(const struct collective *coll)
{
    return inline_payload_fits(&coll->args, collective_nbytes(coll));
}

bool inline_payload_applies(const bhvd_context *ctx, const struct bhvd_operation *op)
{
    const struct process_set *set = process_set_find(&ctx->sets, op->key.process_set);
    return collective_is_small(&op->coll) && !collective_is_on_gpu(&op->coll) && set && set->group.size > 1 && !set->group.shared &&
           inline_payload_is_chosen(ctx->exec.allreduce_path, ctx->tree_fanout == TREE_STAR);
}

void inline_payload_put(struct bytes *out, uint32_t id, const void *values, size_t nbytes)
{
    bytes_put_u8(out, ITEM_INLINE);
    bytes_put_u32(out, id);
    bytes_put_u16(out, (uint16_t)nbytes);
    bytes_put(out, values, nbytes);
}

struct inline_payload inline_payload_take(struct bytes_reader *r)
{
    struct inline_payload item = {.id = bytes_take_u32(r)};
    item.nbytes = bytes_take_u16(r);
    item.values = bytes_take(r, item.nbytes);
    return item;
}

static size_t stride_of(size_t nbytes) { return size_round_up(nbytes, CACHE_LINE); }

bhvd_status inline_payload_add(struct pending *pending, int member, const struct inline_payload *item)
{
    const struct request *request = pending->requests[member];
    const size_t nbytes = item->nbytes;
    if (nbytes != request_nbytes(request) || !inline_payload_fits(&request->args, nbytes))
        return BHVD_ERR_PROTOCOL;
    if (!pending->inline_values)
        pending->inline_values = aligned_alloc(64, (size_t)pending->size * stride_of(nbytes));
    if (!pending->inline_values)
        return BHVD_ERR_SYSTEM;
    memcpy(pending->inline_values + (size_t)member * stride_of(nbytes), item->values, nbytes);
    pending->inline_count++;
    return BHVD_OK;
}

void inline_payload_put_sum(const struct executor *exec, const struct pending *pending, struct bytes *out)
{
    const struct request *request = pending->requests[pending->first];
    const size_t nbytes = request_nbytes(request), count = nbytes / bhvd_dtype_size(request->tensors[0].dtype);
    const struct collective coll = {.args = request->args};
    const struct reduction reduction = reduction_by(exec, &coll, request->tensors[0].dtype, pending->size);
    unsigned char *sum = pending->inline_values;
    for (int i = 0; i < pending->size; i++) {
        unsigned char *values = pending->inline_values + (size_t)i * stride_of(nbytes);
        if (reduction.prescale != 1.0)
            reduction.scale(values, values, reduction.prescale, count);
        if (i)
            reduction.reduce(sum, sum, values, count);
    }
    if (reduction.postscale != 1.0)
        reduction.scale(sum, sum, reduction.postscale, count);
    inline_payload_put(out, pending->entry->id, sum, nbytes);
}

bhvd_status inline_payload_keep_sum(struct bhvd_operation *op, const struct inline_payload *item)
{
    if (!collective_is_small(&op->coll) || item->nbytes != collective_nbytes(&op->coll) || op->inline_sum)
        return BHVD_ERR_PROTOCOL;
    op->inline_sum = malloc(item->nbytes);
    if (!op->inline_sum)
        return BHVD_ERR_SYSTEM;
    memcpy(op->inline_sum, item->values, item->nbytes);
    return BHVD_OK;
}
