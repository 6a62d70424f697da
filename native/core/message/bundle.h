// The requests of a relay and the ranks below it, as one message to its parent. Items of each rank keep their order. Between two
// full requests, cached ids are kept as disjoint runs, each with the ranks that requested it, so that ids that all ranks
// request become one item, however each rank split them into messages.
//
//     groups, each: the set of ranks that requested it, u32 size, items (frame.h)
#pragma once

#include "core/message/rank_set.h"

enum { BUNDLE_RUNS_MAX = 1024 };        // each has a set of ranks: send the message before there are more

struct bundle_run {
    uint64_t id;                        // a 32-bit value; wider, so that an end can be compared
    uint64_t count;
    struct rank_set ranks;
};

struct bundle {
    struct bytes out;                   // complete groups; failed: no memory, permanently
    size_t last_at, last_items;         // begin of the last group, and of its items; 0: no items can be added to it
    struct bundle_run *runs;            // ascending, disjoint; written after the groups
    int run_count, run_capacity;
};

void bundle_fini(struct bundle *bundle);
// Adds items that each of these ranks requested. False: malformed.
bool bundle_put(struct bundle *bundle, const struct rank_set *from, struct bytes_reader items);
// The same for items that need no merging; they are not parsed.
void bundle_put_whole(struct bundle *bundle, const struct rank_set *from, struct bytes_reader items);
static inline bool bundle_is_empty(const struct bundle *bundle) { return !bundle->out.size && !bundle->run_count; }
// Completes the message in bundle->out, which is valid until bundle_clear.
const struct bytes *bundle_write(struct bundle *bundle);
void bundle_clear(struct bundle *bundle);
