// Broadcast in shared memory: the root copies blocks in, the others copy them out.
#include "collective/collectives.h"
#include "collective/pipelines.h"

static unsigned char *buffer_of_root(struct executor *exec, const struct pipeline *pipeline, size_t block)
{
    return shared_buffer(exec, pipeline, pipeline->steps.root, block);
}

static void copy_in(struct executor *exec, struct pipeline *pipeline, size_t block)
{
    const struct broadcast_pipeline *b = (const struct broadcast_pipeline *)pipeline;
    shared_put(exec, buffer_of_root(exec, pipeline, block), b->src + block * SHM_BUFFER_BYTES, shared_block(b->nbytes, block));
}

static void copy_out(struct executor *exec, struct pipeline *pipeline, size_t block)
{
    const struct broadcast_pipeline *b = (const struct broadcast_pipeline *)pipeline;
    b->copy(b->dst + block * SHM_BUFFER_BYTES, buffer_of_root(exec, pipeline, block), shared_block(b->nbytes, block));
}

void broadcast_begin(struct broadcast_pipeline *b, struct executor *exec, struct group *group, int slot, int root, const void *src,
                     void *dst, size_t nbytes)
{
    *b = (struct broadcast_pipeline){.src = src, .dst = dst, .nbytes = nbytes, .copy = shared_copy(exec, nbytes)};
    executor_count_shared(exec, group->rank == root ? nbytes * (size_t)(group->size - 1) : 0, group->rank == root ? 0 : nbytes);
    pipeline_begin(&b->pipeline, group, slot, group->size > 1 ? shared_blocks(nbytes) : 0,
                  &(struct shared_steps){copy_in, NULL, copy_out, true, root});
}

bhvd_status broadcast_shared(struct executor *exec, struct group *group, int root, const void *src, void *dst,
                             size_t nbytes)
{
    struct broadcast_pipeline b;
    broadcast_begin(&b, exec, group, 0, root, src, dst, nbytes);
    bhvd_status status = pipeline_execute(exec, &b.pipeline);
    if (group->rank == root && dst != src)
        span_copy(dst, src, nbytes);
    return status;
}
