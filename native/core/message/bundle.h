// The requests of a relay and the ranks below it, as one message to its parent. Items of each rank keep their order.
// Consecutive equal items share one copy, so the message stays short while all ranks wait for the same operation.
//
//     groups, each: the set of ranks that requested it, u32 size, items (frame.h)
#pragma once

#include "core/message/rank_set.h"

struct bundle {
    struct bytes out;                   // complete groups
    struct bytes items;                 // of the last group, which is not yet in `out`
    struct rank_set ranks;              // that requested them
};

// For a job of `size` ranks. False: no memory.
bool bundle_init(struct bundle *bundle, int size);
void bundle_fini(struct bundle *bundle);
// Adds items that each of these ranks requested; they are not parsed.
void bundle_put(struct bundle *bundle, const struct rank_set *from, struct bytes_reader items);
static inline size_t bundle_size(const struct bundle *bundle) { return bundle->out.size + bundle->items.size; }
// No memory, permanently.
static inline bool bundle_failed(const struct bundle *bundle) { return bundle->out.failed || bundle->items.failed; }
// Completes the message in bundle->out, which is valid until bundle_clear.
const struct bytes *bundle_write(struct bundle *bundle);
void bundle_clear(struct bundle *bundle);
