// Small allreduces between hosts whose agreement is known: their values travel with the request, and the sum with the answer. One
// round trip in all, where an execution over links would follow the answer.
//
//     out = postscale (prescale x_0 + prescale x_1 + ...)      added by the coordinator, in rank order; average: / n
//
// What some member asks for in another way (in full, since it is new or has changed; not at all, since it has joined) is
// executed as ever: then nobody's values are used.
#ifndef BHVD_CARRIED_H
#define BHVD_CARRIED_H

#include "core/context.h"

enum { CARRIED_BYTES = 512 };       // of a tensor, at most

// Do the operation's values go with its request, when that is said by an id?
bool carried_takes(const bhvd_context *ctx, const struct bhvd_handle *op);
// Coordinator: the values of the member at this position, whose request is noted already. False: they do not fit it, or no memory.
bool carried_add(struct pending *pending, int member, const unsigned char *values, size_t nbytes);
// Have all members said theirs?
static inline bool carried_is_whole(const struct pending *pending) { return pending->carried_count == pending->size; }
// Writes the sum, as long as one member's values.
void carried_put_sum(const struct run *run, const struct pending *pending, struct bytes *out);
// Member: the sum that its answer brought. False: it does not fit the operation, or no memory.
bool carried_take_sum(struct bhvd_handle *op, const unsigned char *sum, size_t nbytes);

#endif
