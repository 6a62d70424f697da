// Allgather in shared memory: each member copies in the next piece of its part, and copies out the others' to their offsets.
#include "collective/collectives.h"
#include "collective/pipelines.h"

// Copies to the vector's destinations, from offset `offset` on.
static void put(kernel_copy_fn copy, const struct span_list *dst, size_t offset, const unsigned char *from, size_t nbytes)
{
    const unsigned char *unused;
    unsigned char *to;
    struct span_cursor cursor = span_cursor_at(dst, offset);
    for (size_t n; (n = span_cursor_next(&cursor, nbytes, &unused, &to)); nbytes -= n, from += n) {
        if (to != from)
            copy(to, from, n);
    }
}

static void copy_in(struct executor *exec, struct pipeline *pipeline, size_t block)
{
    const struct allgather_pipeline *g = (const struct allgather_pipeline *)pipeline;
    const struct group *group = pipeline->group;
    shared_put(exec, shared_buffer(exec, pipeline, group->rank, block), g->src + block * SHM_BUFFER_BYTES,
               shared_block(g->part[group->rank], block));
}

static void copy_out(struct executor *exec, struct pipeline *pipeline, size_t block)
{
    const struct allgather_pipeline *g = (const struct allgather_pipeline *)pipeline;
    const struct group *group = pipeline->group;
    for (int k = 1; k < group->size; k++) {
        int i = (group->rank + k) % group->size;      // each rank begins with a different member
        size_t offset = block * SHM_BUFFER_BYTES;
        for (int j = 0; j < i; j++)
            offset += g->part[j];
        put(g->copy, g->dst, offset, shared_buffer(exec, pipeline, i, block), shared_block(g->part[i], block));
    }
}

static const struct shared_steps STEPS = {.copy_in = copy_in, .copy_out = copy_out};

void allgather_begin(struct allgather_pipeline *g, struct executor *exec, struct group *group, int slot, const void *src,
                     const struct span_list *dst, const size_t *part)
{
    size_t longest = 0, total = 0, offset = 0;
    for (int i = 0; i < group->size; i++) {
        longest = part[i] > longest ? part[i] : longest;
        offset += i < group->rank ? part[i] : 0;
        total += part[i];
    }
    *g = (struct allgather_pipeline){.src = src, .dst = dst, .part = part, .copy = shared_copy(exec, total)};
    put(g->copy, dst, offset, src, part[group->rank]);
    executor_count_shared(exec, part[group->rank] * (size_t)(group->size - 1), total - part[group->rank]);
    pipeline_begin(&g->pipeline, group, slot, group->size > 1 ? shared_blocks(longest) : 0, &STEPS);
}

bhvd_status allgather_shared(struct executor *exec, struct group *group, const void *src, const struct span_list *dst,
                             const size_t *part)
{
    struct allgather_pipeline g;
    allgather_begin(&g, exec, group, 0, src, dst, part);
    return pipeline_execute(exec, &g.pipeline);
}
