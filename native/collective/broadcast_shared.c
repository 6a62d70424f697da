// Broadcast in shared memory: the root stages blocks, the others copy them.
#include "collective/shared.h"

struct broadcast {
    bhvd_context *ctx;
    struct process_set *set;
    int root;
    const unsigned char *src;
    unsigned char *dst;
    size_t nbytes;
    kernel_copy_fn copy;
};

static size_t block_bytes(const struct broadcast *b, size_t block)
{
    return shared_piece(b->nbytes, block * HOST_SLAB_BYTES, HOST_SLAB_BYTES);
}

static void stage(void *arg, size_t block)
{
    const struct broadcast *b = arg;
    memcpy(shared_slab(b->ctx, b->set, b->root, block), b->src + block * HOST_SLAB_BYTES, block_bytes(b, block));
}

static void collect(void *arg, size_t block)
{
    const struct broadcast *b = arg;
    b->copy(b->dst + block * HOST_SLAB_BYTES, shared_slab(b->ctx, b->set, b->root, block), block_bytes(b, block));
}

bhvd_status broadcast_shared(bhvd_context *ctx, struct process_set *set, int root, const void *src, void *dst,
                             size_t nbytes)
{
    struct broadcast b = {ctx, set, root, src, dst, nbytes, shared_copy(ctx, nbytes)};
    size_t blocks = set->size > 1 ? shared_blocks(nbytes) : 0;
    bhvd_status status = shared_run(ctx, set, blocks, &(struct shared_steps){stage, NULL, collect, true, root}, &b);
    if (set->rank == root) {
        if (dst != src)
            collective_copy(dst, src, nbytes);
        ctx->counters.payload_bytes_sent += nbytes * (size_t)(set->size - 1);
    } else {
        ctx->counters.payload_bytes_received += nbytes;
    }
    return status;
}
