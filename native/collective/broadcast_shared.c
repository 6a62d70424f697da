// Broadcast in shared memory: the root stages blocks, the others copy them.
#include "collective/collective.h"
#include "run/shared.h"

struct broadcast {
    struct run *run;
    struct group *group;
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
    memcpy(shared_slab(b->run, b->group, b->root, block), b->src + block * HOST_SLAB_BYTES, block_bytes(b, block));
}

static void collect(void *arg, size_t block)
{
    const struct broadcast *b = arg;
    b->copy(b->dst + block * HOST_SLAB_BYTES, shared_slab(b->run, b->group, b->root, block), block_bytes(b, block));
}

bhvd_status broadcast_shared(struct run *run, struct group *group, int root, const void *src, void *dst,
                             size_t nbytes)
{
    struct broadcast b = {run, group, root, src, dst, nbytes, shared_copy(run, nbytes)};
    size_t blocks = group->size > 1 ? shared_blocks(nbytes) : 0;
    bhvd_status status = shared_run(run, group, blocks, &(struct shared_steps){stage, NULL, collect, true, root}, &b);
    if (group->rank == root) {
        if (dst != src)
            span_copy(dst, src, nbytes);
        run_shared_bytes(run, nbytes * (size_t)(group->size - 1));
    } else {
        run->payload_received += nbytes;
    }
    return status;
}
