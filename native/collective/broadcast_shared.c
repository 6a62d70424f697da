// Broadcast in shared memory: the root stages blocks, the others copy them.
#include "collective/collective.h"
#include "collective/pipelines.h"

static size_t block_bytes(const struct broadcast_pipeline *b, size_t block)
{
    return shared_piece(b->nbytes, block * HOST_STAGING_BUFFER_BYTES, HOST_STAGING_BUFFER_BYTES);
}

static unsigned char *buffer_of_root(struct run *run, const struct pipeline *pipeline, size_t block)
{
    return shared_staging_buffer(run, pipeline->group, pipeline->steps.root, block);
}

static void stage(struct run *run, struct pipeline *pipeline, size_t block)
{
    const struct broadcast_pipeline *b = (const struct broadcast_pipeline *)pipeline;
    shared_put(run, buffer_of_root(run, pipeline, block), b->src + block * HOST_STAGING_BUFFER_BYTES, block_bytes(b, block));
}

static void collect(struct run *run, struct pipeline *pipeline, size_t block)
{
    const struct broadcast_pipeline *b = (const struct broadcast_pipeline *)pipeline;
    b->copy(b->dst + block * HOST_STAGING_BUFFER_BYTES, buffer_of_root(run, pipeline, block), block_bytes(b, block));
}

void broadcast_begin(struct broadcast_pipeline *b, struct run *run, struct group *group, int lane, int root, const void *src,
                     void *dst, size_t nbytes)
{
    b->src = src;
    b->dst = dst;
    b->nbytes = nbytes;
    b->copy = shared_copy(run, nbytes);
    run_shared_bytes(run, group->rank == root ? nbytes * (size_t)(group->size - 1) : 0, group->rank == root ? 0 : nbytes);
    pipeline_begin(&b->pipeline, group, lane, group->size > 1 ? shared_blocks(nbytes) : 0,
                  &(struct shared_steps){stage, NULL, collect, true, root});
}

bhvd_status broadcast_shared(struct run *run, struct group *group, int root, const void *src, void *dst,
                             size_t nbytes)
{
    struct broadcast_pipeline b;
    broadcast_begin(&b, run, group, 0, root, src, dst, nbytes);
    bhvd_status status = pipeline_run(run, &b.pipeline);
    if (group->rank == root && dst != src)
        span_copy(dst, src, nbytes);
    return status;
}
