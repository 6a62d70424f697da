// Reducescatter in shared memory. A block holds an equal piece of every member's part, so that all members reduce at the same time:
// member k reduces the k-th piece of all buffers straight into its output.
#include "collective/collectives.h"
#include "collective/pipelines.h"

static void copy_in(struct executor *exec, struct pipeline *pipeline, size_t block)
{
    const struct reducescatter_pipeline *r = (const struct reducescatter_pipeline *)pipeline;
    const struct group *group = pipeline->group;
    unsigned char *buffer = shared_buffer(exec, pipeline, group->rank, block);
    size_t begin = 0, offset = block * r->piece;
    for (int i = 0; i < group->size; begin += r->part[i++]) {
        size_t n = size_piece(r->part[i], offset, r->piece);
        struct span_cursor cursor = span_cursor_at(r->src, begin + offset);
        if (i != group->rank || own_is_copied(r->reduction))
            shared_copy_in(exec, r->reduction, &cursor, buffer + (size_t)i * r->piece, n);
        if (i != group->rank)
            executor_count_shared(exec, n, 0);
    }
}

static void copy_out(struct executor *exec, struct pipeline *pipeline, size_t block)
{
    const struct reducescatter_pipeline *r = (const struct reducescatter_pipeline *)pipeline;
    const struct group *group = pipeline->group;
    const size_t offset = block * r->piece, mine = size_piece(r->part[group->rank], offset, r->piece);
    struct span_cursor cursor = span_cursor_at(r->src, r->own + offset);
    const unsigned char *own;
    unsigned char *unused;
    for (size_t at = 0, n; (n = span_cursor_next(&cursor, mine - at, &own, &unused)); at += n)
        shared_reduce(exec, pipeline, r->reduction, block, (size_t)group->rank * r->piece + at,
                      own_is_copied(r->reduction) ? NULL : own, r->dst + offset + at, n);
    executor_count_shared(exec, 0, mine * (size_t)(group->size - 1));
}

static const struct shared_steps STEPS = {.copy_in = copy_in, .copy_out = copy_out};

void reducescatter_begin(struct reducescatter_pipeline *r, struct group *group, int slot, const struct reduction *reduction,
                         const struct span_list *src, void *dst, const size_t *part)
{
    size_t longest = 0;
    *r = (struct reducescatter_pipeline){.reduction = reduction, .src = src, .dst = dst, .part = part,
                                         .piece = SHM_BUFFER_BYTES / (size_t)group->size / 64 * 64};
    for (int i = 0; i < group->size; i++) {
        longest = part[i] > longest ? part[i] : longest;
        r->own += i < group->rank ? part[i] : 0;
    }
    pipeline_begin(&r->pipeline, group, slot, (longest + r->piece - 1) / r->piece, &STEPS);
}

bhvd_status reducescatter_shared(struct executor *exec, struct group *group, const struct reduction *reduction,
                                 const struct span_list *src, void *dst, const size_t *part)
{
    struct reducescatter_pipeline r;
    reducescatter_begin(&r, group, 0, reduction, src, dst, part);
    return pipeline_execute(exec, &r.pipeline);
}
