// A vector made of several pieces, and its packing into one.
#pragma once

#include <string.h>

#include "executor/collective.h"

// memcpy for which NULL is fine when there is nothing to copy.
static inline void span_copy(void *dst, const void *src, size_t nbytes)
{
    if (nbytes)
        memcpy(dst, src, nbytes);
}

// The pieces: the tensors of operations that are executed together.
struct span {
    const unsigned char *src;
    unsigned char *dst;
    size_t nbytes;
};

struct span_list {
    struct span *spans;
    size_t count, capacity;
    size_t nbytes;              // total
};

bool span_list_add(struct span_list *list, const struct tensor *tensor);
void span_list_fini(struct span_list *list);

// A position in the vector.
struct span_cursor {
    const struct span_list *list;
    size_t span, offset;
};

struct span_cursor span_cursor_at(const struct span_list *list, size_t offset);
// Returns the next contiguous piece, at most `limit` bytes, and moves past it. nbytes 0: the end.
struct span span_cursor_next(struct span_cursor *cursor, size_t limit);
void span_cursor_skip(struct span_cursor *cursor, size_t nbytes);
// Replaces the list's spans, for which it has memory, by the next `nbytes` from the cursor on, or fewer at the end.
void span_list_cut(struct span_list *list, struct span_cursor *cursor, size_t nbytes);

// Copies from the sources / to the destinations, `nbytes` from the cursor on.
void span_pack(struct span_cursor *cursor, void *to, size_t nbytes);
void span_unpack(struct span_cursor *cursor, const void *from, size_t nbytes);

// Returns the sources' piece at `offset` as contiguous memory: in place, or copied to scratch if it crosses spans.
const void *span_source(const struct span_list *list, size_t offset, size_t nbytes, void *scratch);
// Where to write the destinations' piece at `offset`: in place, or in scratch if it crosses spans.
// span_store then copies it to the spans, and does nothing if it is in place.
void *span_target(const struct span_list *list, size_t offset, size_t nbytes, void *scratch);
void span_store(const struct span_list *list, size_t offset, size_t nbytes, const void *from);
