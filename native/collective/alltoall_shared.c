// Alltoall in shared memory. A slab is cut into as many slices as there are receivers; a block takes every pair of members
// one slice further, so that all write and read equally much in every block. What a rank sends to itself goes straight to
// its place, a slice at a time like the rest.
#include "collective/shared.h"

enum { SLICE_ALIGNMENT = 64 };      // a cache line

struct alltoall {
    bhvd_context *ctx;
    struct process_set *set;
    const unsigned char *src;
    unsigned char *dst;
    const size_t *bytes;
    size_t slice;
    kernel_copy_fn copy;
};

// What a member sends to another, or to itself.
static size_t part_bytes(const struct alltoall *a, int from, int to) { return a->bytes[from * a->set->size + to]; }

static size_t piece_bytes(const struct alltoall *a, int from, int to, size_t block)
{
    return shared_piece(part_bytes(a, from, to), block * a->slice, a->slice);
}

// Where in the sender's slab the slice lies that is meant for `to`.
static unsigned char *slice_of(const struct alltoall *a, int from, int to, size_t block)
{
    return shared_slab(a->ctx, a->set, from, block) + (size_t)(to < from ? to : to - 1) * a->slice;
}

static void stage(void *arg, size_t block)
{
    const struct alltoall *a = arg;
    const int me = a->set->rank;
    const unsigned char *part = a->src;
    for (int to = 0; to < a->set->size; part += part_bytes(a, me, to++)) {
        const size_t n = to == me ? 0 : piece_bytes(a, me, to, block);
        if (n)
            memcpy(slice_of(a, me, to, block), part + block * a->slice, n);
    }
}

static void collect(void *arg, size_t block)
{
    const struct alltoall *a = arg;
    const int me = a->set->rank;
    const unsigned char *own = a->src;
    unsigned char *part = a->dst;
    for (int to = 0; to < me; to++)
        own += part_bytes(a, me, to);
    for (int from = 0; from < a->set->size; part += part_bytes(a, from++, me)) {
        const size_t n = piece_bytes(a, from, me, block);
        if (n)
            a->copy(part + block * a->slice, from == me ? own + block * a->slice : slice_of(a, from, me, block), n);
    }
}

bhvd_status alltoall_shared(bhvd_context *ctx, struct process_set *set, const void *src, void *dst, const size_t *bytes)
{
    const int n = set->size, me = set->rank;
    struct alltoall a = {ctx, set, src, dst, bytes, HOST_SLAB_BYTES, NULL};
    size_t longest = 0, total = 0;
    if (n > 2)
        a.slice = HOST_SLAB_BYTES / (size_t)(n - 1) / SLICE_ALIGNMENT * SLICE_ALIGNMENT;
    for (int i = 0; i < n * n; i++)
        longest = bytes[i] > longest ? bytes[i] : longest;
    for (int i = 0; i < n; i++) {
        ctx->counters.payload_bytes_sent += i == me ? 0 : bytes[me * n + i];
        total += bytes[i * n + me];
    }
    ctx->counters.payload_bytes_received += total - bytes[me * n + me];
    if (n == 1) {
        collective_copy(dst, src, bytes[0]);
        return BHVD_OK;
    }
    a.copy = shared_copy(ctx, total);
    const size_t blocks = (longest + a.slice - 1) / a.slice;
    return shared_run(ctx, set, blocks, &(struct shared_steps){stage, NULL, collect, .root = 0}, &a);
}
