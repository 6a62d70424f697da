// Alltoall in shared memory: everyone stages the next block of what it sends, and takes from each slab the part that is
// meant for it. The part that a rank sends to itself goes straight to its place.
#include "collective/shared.h"

struct interval {
    size_t begin, end;
};

// The bytes from `from` to `to`, as they lie in what `from` sends.
static struct interval sent_part(const size_t *bytes, int size, int from, int to)
{
    struct interval part = {0, 0};
    for (int i = 0; i < to; i++)
        part.begin += bytes[from * size + i];
    part.end = part.begin + bytes[from * size + to];
    return part;
}

static struct interval intersect(struct interval a, struct interval b)
{
    struct interval both = {a.begin > b.begin ? a.begin : b.begin, a.end < b.end ? a.end : b.end};
    return both.begin < both.end ? both : (struct interval){0, 0};
}

// Copies what of `part` lies in `block` to the slab, at the same place as in the block.
static void stage(unsigned char *slab, const unsigned char *src, struct interval block, struct interval part)
{
    struct interval piece = intersect(block, part);
    if (piece.begin < piece.end)
        memcpy(slab + (piece.begin - block.begin), src + piece.begin, piece.end - piece.begin);
}

bhvd_status alltoall_shared(bhvd_context *ctx, struct process_set *set, const void *src, void *dst, const size_t *bytes)
{
    const int n = set->size, me = set->rank;
    const struct interval own = sent_part(bytes, n, me, me);
    const size_t total = sent_part(bytes, n, me, n - 1).end;
    size_t longest = 0;
    for (int i = 0; i < n && n > 1; i++) {
        size_t end = sent_part(bytes, n, i, n - 1).end;
        longest = end > longest ? end : longest;
    }
    bhvd_status status = BHVD_OK;
    for (size_t offset = 0; offset < longest && !status; offset += HOST_SLAB_BYTES) {
        struct interval block = {offset, offset + HOST_SLAB_BYTES};
        unsigned char *slab = shared_slab(ctx, set, me);
        stage(slab, src, block, (struct interval){0, own.begin});
        stage(slab, src, block, (struct interval){own.end, total});
        status = shared_barrier(ctx, set);
        size_t place = 0;
        for (int i = 0; i < n && !status; place += bytes[i++ * n + me]) {
            struct interval part = sent_part(bytes, n, i, me), piece = intersect(block, part);
            const unsigned char *from = i == me ? (const unsigned char *)src + piece.begin
                                                : shared_slab(ctx, set, i) + (piece.begin - block.begin);
            if (piece.begin < piece.end)
                memcpy((char *)dst + place + (piece.begin - part.begin), from, piece.end - piece.begin);
        }
        shared_next_block(set);
    }
    if (n == 1 && total)
        memcpy(dst, src, total);
    ctx->counters.payload_bytes_sent += total - bytes[me * n + me];
    for (int i = 0; i < n; i++)
        ctx->counters.payload_bytes_received += i == me ? 0 : bytes[i * n + me];
    return status;
}
