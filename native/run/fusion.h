// The fusion buffer: scratch memory in which several tensors lie as one vector. Kept between operations. Engine only.
#ifndef BHVD_FUSION_H
#define BHVD_FUSION_H

#include <string.h>

#include "run/run.h"
#include "run/work.h"

// memcpy for which NULL is fine when there is nothing to copy.
static inline void span_copy(void *dst, const void *src, size_t nbytes)
{
    if (nbytes)
        memcpy(dst, src, nbytes);
}

// A vector that lies in pieces: the tensors of the operations executed together.
struct span {
    const unsigned char *src;
    unsigned char *dst;
    size_t nbytes;
};

struct span_list {
    struct span *spans;
    size_t count, capacity;
    size_t nbytes;              // in all
};

bool span_list_add(struct span_list *list, const struct tensor *tensor);
void span_list_fini(struct span_list *list);

// A place in the vector.
struct span_cursor {
    const struct span_list *list;
    size_t span, offset;
};

struct span_cursor span_cursor_at(const struct span_list *list, size_t offset);
// The next contiguous piece, at most `limit` bytes, and moves past it. 0: the end.
size_t span_cursor_next(struct span_cursor *cursor, size_t limit, const unsigned char **src, unsigned char **dst);
void span_cursor_skip(struct span_cursor *cursor, size_t nbytes);

// Copies from the sources / to the destinations, `nbytes` from the cursor on.
void span_pack(struct span_cursor *cursor, void *to, size_t nbytes);
void span_unpack(struct span_cursor *cursor, const void *from, size_t nbytes);

// The piece of the sources at `offset` in one: where it lies, or a copy of it in scratch when it lies in several spans.
const void *span_source(const struct span_list *list, size_t offset, size_t nbytes, void *scratch);
// Where to write the piece of the destinations at `offset`: the place itself, or scratch when that is several spans.
// span_store puts it where it belongs then, and does nothing when it is there already.
void *span_target(const struct span_list *list, size_t offset, size_t nbytes, void *scratch);
void span_store(const struct span_list *list, size_t offset, size_t nbytes, const void *from);

// Scratch memory of at least this size, 64-byte aligned, valid until the next call for the same number: 0 and 1 are of what runs to
// its end, 2 of a step while it is done. NULL: no memory.
enum { SCRATCH_OF_STEPS = 2 };
void *fusion_acquire(struct run *run, int number, size_t size);
// Memory for what goes on beside others: 64-byte aligned, kept between operations. False: no memory.
bool fusion_borrow(struct run *run, size_t size, struct fusion_buffer *out);
void fusion_return(struct run *run, struct fusion_buffer *buffer);       // NULL data: nothing happens
// Frees what has not been used for FUSION_IDLE_MS. Nothing runs to its end now.
enum { FUSION_IDLE_MS = 10000 };
void fusion_trim(struct run *run, int64_t now_ns);
void fusion_fini(struct run *run);

#endif
