// The encoding of cached agreements in requests and responses: ranges of consecutive ids, since ids are assigned in the order
// in which operations are first agreed on, and a program repeats itself. Wire: u8 ITEM_CACHED, u32 id, u32 count.
#pragma once

#include "base/bytes.h"

enum { ID_RANGE_MAX = 1 << 16 };

// The range at the end of a frame that is being written; zero if there is none.
struct id_range {
    uint32_t id, count;
    size_t end;                 // of the frame, when the range was last written
};

// Appends the id to the range, or begins a new one.
void id_range_put(struct id_range *range, struct bytes *out, uint32_t id);
// Call after reading the tag. Marks the reader as failed if the range is malformed.
struct id_range id_range_take(struct bytes_reader *r);
