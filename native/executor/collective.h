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
    bhvd_kind kind;
    const char *name;                   // not 0-terminated
    uint16_t name_size;
    bool is_proxy;                      // created for a rank that did not post it (member.c): sends zeros, no output
    bhvd_op op;
    int root_rank;
    double prescale_factor, postscale_factor;
    bhvd_codec codec;
    struct bhvd_codec_options codec_options;
    bhvd_exchange exchange;
    bhvd_topology topology;
    int round;
    bool hierarchical;
    float *replicas[REPLICAS];
    bhvd_device_array *replica_copies[REPLICAS];  // device copies of replicas; NULL: none
    double before[1 + REPLICAS], after[1 + REPLICAS];   // of values, own, left, right
    bool mixes_before, mixes_after;             // are these coefficients used?
    float *worker_residual, *server_residual;
    bhvd_device_array *worker_copy, *server_copy; // device copies of these, which may hold the newest values; NULL: none
    struct staging *staging;            // for tensors on a GPU (gpu/staging.h); NULL: they are in host memory
    size_t tensor_count;
    struct tensor *tensors;
};

// For an alltoall: bytes that this member sends to each member, and receives from each, by position. longest: upper bound of the
// bytes between any two members; equal on all.
struct parts {
    const size_t *sent, *received;
    size_t longest;
};

// Total over all tensors.
size_t collective_nbytes(const struct collective *coll);
// Memory kept from one operation to the next; NULL: none. Operations with the same memory run one after the other.
static inline const void *collective_exclusive_memory(const struct collective *coll)
{
    return coll->worker_residual ? coll->worker_residual : coll->server_residual ? coll->server_residual : coll->replicas[1];
}
// The factor for the sum over `size` members.
static inline double collective_sum_factor(const struct collective *coll, int size)
{
    return coll->postscale_factor / (coll->op == BHVD_OP_AVERAGE ? size : 1);
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
