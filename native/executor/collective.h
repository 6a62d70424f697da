// A collective to execute: tensors and parameters, all of an operation that the executor sees (core/context/operation.h).
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <string.h>

#include "bagua_hvd.h"
#include "base/block_pool.h"

enum { REPLICAS = 3 };                  // own, left, right

struct tensor {
    const void *src;
    void *dst;                  // NULL: the core allocates the result
    size_t count, nbytes;
    int64_t dim0;
    size_t row_nbytes;          // of one index of dim 0
    bhvd_dtype dtype;
    void *result;               // allocated by the core, owned until taken
    size_t result_nbytes;
    int64_t result_dim0;
};

struct collective {
    struct bhvd_args args;              // as posted, but `tensors` is NULL, `name` not 0-terminated, a copy without its array NULL
    uint16_t name_size;
    bool is_proxy;                      // created for a rank that did not post it (member.c): sends zeros, no output
    struct tensor *tensors;             // args.tensor_count
    struct staging *staging;            // for tensors on a GPU (gpu/staging.h); NULL: they are in host memory
};

// For an alltoall: bytes that this member sends to each member, and receives from each, by position. longest: upper bound of the
// bytes between any two members; equal on all.
struct parts {
    const size_t *sent, *received;
    size_t longest;
};

// Total over all tensors.
size_t collective_nbytes(const struct collective *coll);
// On all members; even so, a proxy's own memory is host memory.
static inline bool collective_is_on_gpu(const struct collective *coll) { return coll->args.device >= 0; }
// D_LP_S: are these the weights of any replicas?
static inline bool collective_mixes(const double weights[REPLICAS])
{
    return weights[0] != 0 || weights[1] != 0 || weights[2] != 0;
}
// Memory kept from one operation to the next; NULL: none. Operations with the same memory run one after the other.
static inline const void *collective_exclusive_memory(const struct collective *coll)
{
    const struct bhvd_args *args = &coll->args;
    return args->worker_residual ? args->worker_residual : args->server_residual ? args->server_residual : args->replicas[1];
}
// The factor for the sum over `size` members.
static inline double collective_sum_factor(const struct collective *coll, int size)
{
    return coll->args.postscale_factor / (coll->args.op == BHVD_OP_AVERAGE ? size : 1);
}

// Memory of the results that the core allocates.
extern struct block_pool result_memory;
enum { RESULT_MEMORY_KEPT = 32 << 20 };     // limit of the freed bytes that a process keeps

// span.c: a vector made of several pieces, and its packing into one.

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
