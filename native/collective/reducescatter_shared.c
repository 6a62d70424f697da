// Reducescatter in shared memory: a block holds an equal piece of every member's part, so that all of them reduce at the
// same time; member k reduces the k-th piece of all slabs straight into its output.
#include "collective/shared.h"

// How much of a part of `total` bytes lies in the piece that begins at `offset`.
static size_t piece_size(size_t total, size_t offset, size_t piece)
{
    return total <= offset ? 0 : total - offset < piece ? total - offset : piece;
}

bhvd_status reducescatter_shared(bhvd_context *ctx, struct process_set *set, const struct reduction *reduction,
                                 const struct span_list *src, void *dst, const size_t *part)
{
    const size_t piece = HOST_SLAB_BYTES / (size_t)set->size / 64 * 64;
    size_t longest = 0;
    for (int i = 0; i < set->size; i++)
        longest = part[i] > longest ? part[i] : longest;
    bhvd_status status = BHVD_OK;
    for (size_t offset = 0; offset < longest && !status; offset += piece) {
        unsigned char *slab = shared_slab(ctx, set, set->rank);
        size_t begin = 0;
        for (int i = 0; i < set->size; begin += part[i++]) {
            size_t n = piece_size(part[i], offset, piece);
            struct span_cursor cursor = span_cursor_at(src, begin + offset);
            shared_stage(reduction, &cursor, slab + (size_t)i * piece, n);
            if (i != set->rank)
                ctx->counters.payload_bytes_sent += n;
        }
        status = shared_barrier(ctx, set);
        size_t mine = piece_size(part[set->rank], offset, piece);
        if (!status)
            shared_reduce(ctx, set, reduction, (size_t)set->rank * piece, (unsigned char *)dst + offset, mine);
        ctx->counters.payload_bytes_received += mine * (size_t)(set->size - 1);
        shared_next_block(set);
    }
    return status;
}
