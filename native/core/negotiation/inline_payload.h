// Small allreduces between hosts whose agreement is known: their values travel with the request, and the sum with the response. One
// round trip in all, where an execution over links would follow the response.
//
//     out = postscale (prescale x_0 + prescale x_1 + ...)      added by the coordinator, in rank order; average: / n
//
// What some member asks for in another way (in full, since it is new or has changed; not at all, since it has joined) is
// executed as ever: then nobody's values are used.
#pragma once

#include "collective/collective.h"
#include "core/context/operation.h"
#include "core/negotiation/pending.h"
#include "run/run.h"

enum { INLINE_PAYLOAD_BYTES = 512 };  // of a tensor, at most

// Is the operation such that its values may go with its request ...
static inline bool inline_payload_fits(bhvd_kind kind, bhvd_op op, size_t tensors, size_t nbytes)
{
    return kind == BHVD_ALLREDUCE && op != BHVD_OP_ADASUM && tensors == 1 && nbytes && nbytes <= INLINE_PAYLOAD_BYTES;
}
// ... and is that the path that is chosen for it? in_star: requests go to the coordinator without relays.
static inline bool inline_payload_is_chosen(enum allreduce_path path, bool in_star)
{
    return path == ALLREDUCE_CHOSEN && in_star;
}
// Do the operation's, when that is said by an id?
bool inline_payload_takes(const bhvd_context *ctx, const struct bhvd_handle *op);
// Values, or a sum, of the operation that this id stands for: as it is said, in requests and answers alike (ITEM_INLINE).
struct inline_payload {
    uint32_t id;
    uint16_t nbytes;
    const unsigned char *values;        // NULL: malformed
};

void inline_payload_put(struct bytes *out, uint32_t id, const void *values, size_t nbytes);
// What follows the tag.
struct inline_payload inline_payload_take(struct bytes_reader *r);

// Coordinator: the values of the member at this position, whose request is noted already. False: they do not fit it, or no memory.
bool inline_payload_add(struct pending *pending, int member, const struct inline_payload *item);
// Have all members said theirs?
static inline bool inline_payload_is_whole(const struct pending *pending) { return pending->inline_count == pending->size; }
// Says the sum of all.
void inline_payload_put_sum(const struct run *run, const struct pending *pending, struct bytes *out);
// Member: keeps the sum that its response brought. False: it does not fit the operation, or no memory.
bool inline_payload_keep_sum(struct bhvd_handle *op, const struct inline_payload *item);
