// Allreduce in shared memory.
//
// A block is at most one slab long. Small ones (one hop, one barrier): every member reduces all slabs itself. Large ones
// (two barriers): the block is cut into n chunks, member k reduces chunk k of all slabs and leaves the sum in its own
// slab, and everyone collects the chunks. Either way the sum is taken in rank order, so that the result depends neither
// on the path nor on what was fused with what, and is bit-equal on all ranks.
#include "collective/shared.h"

enum {
    SMALL_BYTES = 4096          // up to this each member reduces everything: cheaper than a second barrier
};

static size_t min_size(size_t a, size_t b) { return a < b ? a : b; }

// Chunk boundaries of a block: multiples of the cache line where there is enough, so that members do not share lines.
static size_t chunk_begin(size_t nbytes, int index, int size)
{
    size_t lines = (nbytes + 63) / 64;
    return min_size(nbytes, lines * (size_t)index / (size_t)size * 64);
}

static bhvd_status allreduce_small_block(bhvd_context *ctx, struct process_set *set, const struct reduction *reduction,
                                         struct span_cursor *out, size_t nbytes)
{
    bhvd_status status = shared_barrier(ctx, set);
    const unsigned char *src;
    unsigned char *dst;
    size_t offset = 0;
    for (size_t n; !status && (n = span_cursor_next(out, nbytes - offset, &src, &dst)); offset += n)
        shared_reduce(ctx, set, reduction, offset, dst, n);
    return status;
}

static bhvd_status allreduce_large_block(bhvd_context *ctx, struct process_set *set, const struct reduction *reduction,
                                         struct span_cursor *out, size_t nbytes)
{
    bhvd_status status = shared_barrier(ctx, set);
    if (status)
        return status;
    size_t begin = chunk_begin(nbytes, set->rank, set->size), end = chunk_begin(nbytes, set->rank + 1, set->size);
    shared_reduce(ctx, set, reduction, begin, shared_slab(ctx, set, set->rank) + begin, end - begin);
    status = shared_barrier(ctx, set);
    for (int i = 0; i < set->size && !status; i++) {
        begin = chunk_begin(nbytes, i, set->size);
        end = chunk_begin(nbytes, i + 1, set->size);
        span_unpack(out, shared_slab(ctx, set, i) + begin, end - begin);
    }
    return status;
}

bhvd_status allreduce_shared(bhvd_context *ctx, struct process_set *set, const struct reduction *reduction,
                             const struct span_list *list)
{
    struct span_cursor in = span_cursor_at(list, 0), out = span_cursor_at(list, 0);
    bhvd_status status = BHVD_OK;
    for (size_t left = list->nbytes; left && !status;) {
        size_t nbytes = min_size(left, HOST_SLAB_BYTES);
        bool small = nbytes <= SMALL_BYTES;
        shared_stage(reduction, &in, shared_slab(ctx, set, set->rank), nbytes);
        status = small ? allreduce_small_block(ctx, set, reduction, &out, nbytes)
                       : allreduce_large_block(ctx, set, reduction, &out, nbytes);
        // What the others read from this member: its slab (or all chunks of it but its own), and its reduced chunk.
        size_t others = (size_t)set->size - 1;
        size_t own = chunk_begin(nbytes, set->rank + 1, set->size) - chunk_begin(nbytes, set->rank, set->size);
        ctx->counters.payload_bytes_sent += small ? others * nbytes : nbytes - own + others * own;
        ctx->counters.payload_bytes_received += small ? others * nbytes : nbytes - own + others * own;
        shared_next_block(set);
        left -= nbytes;
    }
    return status;
}
