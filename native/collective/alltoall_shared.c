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
static void stage_part(unsigned char *slab, const unsigned char *src, struct interval block, struct interval part)
{
    struct interval piece = intersect(block, part);
    if (piece.begin < piece.end)
        memcpy(slab + (piece.begin - block.begin), src + piece.begin, piece.end - piece.begin);
}

struct alltoall {
    bhvd_context *ctx;
    struct process_set *set;
    const unsigned char *src;
    unsigned char *dst;
    const size_t *bytes;
};

static struct interval interval_of(size_t block)
{
    return (struct interval){block * HOST_SLAB_BYTES, (block + 1) * HOST_SLAB_BYTES};
}

static void stage(void *arg, size_t block)
{
    const struct alltoall *a = arg;
    const int n = a->set->size, me = a->set->rank;
    const struct interval own = sent_part(a->bytes, n, me, me);
    unsigned char *slab = shared_slab(a->ctx, a->set, me, block);
    stage_part(slab, a->src, interval_of(block), (struct interval){0, own.begin});
    stage_part(slab, a->src, interval_of(block), (struct interval){own.end, sent_part(a->bytes, n, me, n - 1).end});
}

static void collect(void *arg, size_t block)
{
    const struct alltoall *a = arg;
    const int n = a->set->size, me = a->set->rank;
    const struct interval whole = interval_of(block);
    size_t place = 0;
    for (int i = 0; i < n; place += a->bytes[i++ * n + me]) {
        struct interval part = sent_part(a->bytes, n, i, me), piece = intersect(whole, part);
        const unsigned char *from = i == me ? a->src + piece.begin
                                            : shared_slab(a->ctx, a->set, i, block) + (piece.begin - whole.begin);
        if (piece.begin < piece.end)
            memcpy(a->dst + place + (piece.begin - part.begin), from, piece.end - piece.begin);
    }
}

bhvd_status alltoall_shared(bhvd_context *ctx, struct process_set *set, const void *src, void *dst, const size_t *bytes)
{
    struct alltoall a = {ctx, set, src, dst, bytes};
    const int n = set->size, me = set->rank;
    const size_t total = sent_part(bytes, n, me, n - 1).end;
    size_t longest = 0;
    for (int i = 0; i < n && n > 1; i++) {
        size_t end = sent_part(bytes, n, i, n - 1).end;
        longest = end > longest ? end : longest;
    }
    if (n == 1)
        collective_copy(dst, src, total);
    ctx->counters.payload_bytes_sent += total - bytes[me * n + me];
    for (int i = 0; i < n; i++)
        ctx->counters.payload_bytes_received += i == me ? 0 : bytes[i * n + me];
    return shared_run(ctx, set, shared_blocks(longest), &(struct shared_steps){stage, NULL, collect, .root = 0}, &a);
}
