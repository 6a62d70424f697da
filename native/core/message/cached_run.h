// How cached agreements travel, in requests and in answers: as runs of consecutive ids, since ids were given in the order
// in which the operations were first agreed on, and a program repeats itself. Wire: u8 ITEM_CACHED, u32 id, u32 count.
#ifndef BHVD_CACHED_RUN_H
#define BHVD_CACHED_RUN_H

#include "base/bytes.h"

enum { CACHED_RUN_MAX = 1 << 16 };

// The run at the end of a frame that is being written; zero when there is none.
struct cached_run {
    uint32_t id, count;
    size_t end;                 // of the frame, when the run was last written
};

// Appends the id to the run, or begins a new one.
void cached_run_put(struct cached_run *run, struct bytes *out, uint32_t id);
// After the tag. Marks the reader as failed when it is malformed.
struct cached_run cached_run_take(struct bytes_reader *r);

#endif
