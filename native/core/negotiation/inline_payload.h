// Small allreduces between hosts that have a cached agreement: their values are sent with the request, and the sum with the
// response. This takes one round trip, and no execution over links after the response.
//
//     out = postscale (prescale x_0 + prescale x_1 + ...)      added by the coordinator, in rank order; average: / n
//
// If some member requests the operation differently (in full, since it is new or has changed; not at all, since it has joined), it
// is executed as usual, and the values are ignored.
#pragma once

#include "collective/collectives.h"
#include "core/context/operation.h"
#include "core/negotiation/pending.h"

enum { INLINE_PAYLOAD_BYTES = 512 };  // of the one tensor

// May the operation send its values with its request: a small allreduce of one tensor, not Adasum ...
static inline bool inline_payload_fits(const struct bhvd_args *args, size_t nbytes)
{
    return args->kind == BHVD_ALLREDUCE && args->op != BHVD_OP_ADASUM && args->tensor_count == 1 && nbytes &&
           nbytes <= INLINE_PAYLOAD_BYTES;
}
// ... and is this path chosen for it? in_star: requests go to the coordinator without relays.
static inline bool inline_payload_is_chosen(enum allreduce_path path, bool in_star)
{
    return path == ALLREDUCE_CHOSEN && in_star;
}
// Is this operation's payload inline, if it is requested by id?
bool inline_payload_applies(const bhvd_context *ctx, const struct bhvd_operation *op);
// The values, or the sum, of the operation with this id, in requests and responses (ITEM_INLINE).
struct inline_payload {
    uint32_t id;
    uint16_t nbytes;
    const unsigned char *values;        // NULL: malformed
};

void inline_payload_put(struct bytes *out, uint32_t id, const void *values, size_t nbytes);
// Reads it after the tag.
struct inline_payload inline_payload_take(struct bytes_reader *r);

// Coordinator: adds the values of the member at this position, whose request is already stored. BHVD_ERR_PROTOCOL: wrong size.
// BHVD_ERR_SYSTEM: no memory.
bhvd_status inline_payload_add(struct pending *pending, int member, const struct inline_payload *item);
// Have all members sent their values?
static inline bool inline_payload_is_whole(const struct pending *pending) { return pending->inline_count == pending->size; }
// Writes the sum of all.
void inline_payload_put_sum(const struct executor *exec, const struct pending *pending, struct bytes *out);
// Member: keeps the sum of the response. BHVD_ERR_PROTOCOL: it does not fit the operation. BHVD_ERR_SYSTEM: no memory.
bhvd_status inline_payload_keep_sum(struct bhvd_operation *op, const struct inline_payload *item);
