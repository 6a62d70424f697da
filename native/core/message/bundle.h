// What a relay and those below it announce, as one message to its parent. Items of each rank keep their order. Between two
// requests in full, cached ids are kept as disjoint runs, each with the ranks that announced it, so that what all ranks
// announce is one item, however each cut it into messages.
//
//     groups, each: the set of ranks that it is from, u32 size, items (frame.h)
#pragma once

#include "core/message/rank_set.h"

enum { BUNDLE_RUNS_MAX = 1024 };        // each has a set of ranks: a message should go before there are more

struct bundle_run {
    uint64_t id;                        // of 32 bits; wider, so that an end can be compared
    uint64_t count;
    struct rank_set ranks;
};

struct bundle {
    struct bytes out;                   // groups that are complete; failed: no memory, for good
    size_t last_at, last_items;         // where the last of them begins, and its items; 0: nothing can be added to it
    struct bundle_run *runs;            // rising, disjoint; they come after them
    int run_count, run_capacity;
};

void bundle_fini(struct bundle *bundle);
// Adds items that each of these ranks announced. False: malformed.
bool bundle_put(struct bundle *bundle, const struct rank_set *from, struct bytes_reader items);
// The same of items that need not be merged, and are not looked at.
void bundle_put_whole(struct bundle *bundle, const struct rank_set *from, struct bytes_reader items);
static inline bool bundle_is_empty(const struct bundle *bundle) { return !bundle->out.size && !bundle->run_count; }
// The message, in bundle->out, until bundle_clear.
const struct bytes *bundle_write(struct bundle *bundle);
void bundle_clear(struct bundle *bundle);
