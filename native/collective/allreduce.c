// Allreduce in shared memory, in blocks of one buffer. The block is cut into n chunks. Member k copies in all chunks but
// k for the others. It reduces chunk k of all members into its buffer, reading its own in place. Then all members copy out the
// chunks. Up to SMALL_BYTES, each member reduces everything itself. Either way the sum is in rank order, so the result is
// bit-equal on all ranks and independent of the path and of fusion.
#include "collective/collectives.h"

#include "collective/shards.h"

enum {
    SMALL_BYTES = 4096          // up to this each member reduces everything: cheaper than a second synchronization
};
_Static_assert((size_t)SMALL_BYTES <= (size_t)SHM_BUFFER_BYTES, "a short vector is one block");

// Chunk boundaries of a block: multiples of the cache line if the block is long enough, so that members do not share lines.
static size_t chunk_begin(size_t nbytes, int index, int size)
{
    size_t lines = (nbytes + 63) / 64, begin = lines * (size_t)index / (size_t)size * 64;
    return begin < nbytes ? begin : nbytes;
}

static void copy_in(struct executor *exec, struct pipeline *pipeline, size_t block)
{
    struct allreduce_pipeline *a = (struct allreduce_pipeline *)pipeline;
    unsigned char *buffer = shared_buffer(exec, pipeline, pipeline->group->rank, block);
    shared_copy_in(exec, a->reduction, &a->in, buffer, shared_block(a->nbytes, block));
}

static void copy_chunks_in(struct executor *exec, struct pipeline *pipeline, size_t block)
{
    struct allreduce_pipeline *a = (struct allreduce_pipeline *)pipeline;
    const int rank = pipeline->group->rank, size = pipeline->group->size;
    unsigned char *buffer = shared_buffer(exec, pipeline, rank, block);
    const size_t nbytes = shared_block(a->nbytes, block);
    const size_t begin = chunk_begin(nbytes, rank, size), end = chunk_begin(nbytes, rank + 1, size);
    shared_copy_in(exec, a->reduction, &a->in, buffer, own_is_copied(a->reduction) ? end : begin);
    if (!own_is_copied(a->reduction))
        span_cursor_skip(&a->in, end - begin);
    shared_copy_in(exec, a->reduction, &a->in, buffer + end, nbytes - end);
}

static void reduce_all(struct executor *exec, struct pipeline *pipeline, size_t block)
{
    struct allreduce_pipeline *a = (struct allreduce_pipeline *)pipeline;
    size_t offset = 0;
    for (struct span s; (s = span_cursor_next(&a->out, a->nbytes - offset)).nbytes; offset += s.nbytes)
        shared_reduce(exec, pipeline, a->reduction, block, offset, NULL, s.dst, s.nbytes);
}

// In place, the memory that a result overwrites was read just now and is in the caches, so a plain copy is best.
static void put(const struct allreduce_pipeline *a, const struct span *to, const unsigned char *from)
{
    (to->src == to->dst ? span_copy : a->copy)(to->dst, from, to->nbytes);
}

// Writes the sum for the others and to its own destination, while it is in the L1 cache.
static void reduce_chunk(struct executor *exec, struct pipeline *pipeline, size_t block)
{
    struct allreduce_pipeline *a = (struct allreduce_pipeline *)pipeline;
    const int rank = pipeline->group->rank, size = pipeline->group->size;
    unsigned char *buffer = shared_buffer(exec, pipeline, rank, block);
    const size_t nbytes = shared_block(a->nbytes, block), end = chunk_begin(nbytes, rank + 1, size);
    _Alignas(64) unsigned char sum[SHARED_L1_BYTES];
    size_t at = chunk_begin(nbytes, rank, size);
    span_cursor_skip(&a->own, at);
    for (struct span s; (s = span_cursor_next(&a->own, size_piece(end, at, SHARED_L1_BYTES))).nbytes; at += s.nbytes) {
        unsigned char *to = exec->writes.streamed ? sum : buffer + at;
        shared_reduce(exec, pipeline, a->reduction, block, at, own_is_copied(a->reduction) ? NULL : s.src, to, s.nbytes);
        if (to == sum)
            shared_put(exec, buffer + at, sum, s.nbytes);
        put(a, &s, to);
    }
    span_cursor_skip(&a->own, nbytes - end);
}

static void copy_out(struct executor *exec, struct pipeline *pipeline, size_t block)
{
    struct allreduce_pipeline *a = (struct allreduce_pipeline *)pipeline;
    const int size = pipeline->group->size;
    const size_t nbytes = shared_block(a->nbytes, block);
    for (int i = 0; i < size; i++) {
        size_t at = chunk_begin(nbytes, i, size);
        const size_t end = chunk_begin(nbytes, i + 1, size);
        const unsigned char *buffer = shared_buffer(exec, pipeline, i, block);
        if (i == pipeline->group->rank)
            span_cursor_skip(&a->out, end - at);
        else
            for (struct span s; (s = span_cursor_next(&a->out, end - at)).nbytes; at += s.nbytes)
                put(a, &s, buffer + at);
    }
    // Bytes that the others read from this member: all chunks but its own, to reduce them, and the sum of its own.
    const size_t own = chunk_begin(nbytes, pipeline->group->rank + 1, size) - chunk_begin(nbytes, pipeline->group->rank, size);
    const size_t read = nbytes - own + ((size_t)size - 1) * own;
    executor_count_shared(exec, read, read);
}

static const struct shared_steps AT_ONCE = {.copy_in = copy_in, .copy_out = reduce_all};
static const struct shared_steps BY_CHUNKS = {.copy_in = copy_chunks_in, .reduce = reduce_chunk, .copy_out = copy_out};

void allreduce_begin(struct allreduce_pipeline *a, struct executor *exec, struct group *group, int slot,
                     const struct reduction *reduction, const struct span_list *list)
{
    a->reduction = reduction;
    a->in = a->own = a->out = span_cursor_at(list, 0);
    a->nbytes = list->nbytes;
    a->copy = shared_copy(exec, list->nbytes);
    if (list->nbytes > SMALL_BYTES) {
        pipeline_begin(&a->pipeline, group, slot, shared_blocks(list->nbytes), &BY_CHUNKS);
        return;
    }
    executor_count_shared(exec, ((size_t)group->size - 1) * list->nbytes, ((size_t)group->size - 1) * list->nbytes);
    pipeline_begin(&a->pipeline, group, slot, list->nbytes > 0, &AT_ONCE);
}

bhvd_status allreduce_shared(struct executor *exec, struct group *group, const struct reduction *reduction,
                             const struct span_list *list)
{
    struct allreduce_pipeline a;
    allreduce_begin(&a, exec, group, 0, reduction, list);
    return pipeline_execute(exec, &a.pipeline);
}

// -------------------------------------------------------------------------------------------------------- hierarchical

// Hierarchical allreduce: in shards (shards.h), each reduced among its owners.
// Cost: 2 N (h-1)/h elements each way per host of h, however many ranks it holds; a ring over all n ranks sends 2 N (n-1)/n
// over a host's link, and that in 2 (n-1) latencies instead of 2 (h-1).

static void write_shard(const struct shards *x, struct schedule *schedule, struct byte_range mine)
{
    allreduce_schedule(schedule, x->exec->allreduce_path, &x->network, mine.nbytes, bhvd_dtype_size(x->reduction.dtype));
}

bhvd_status allreduce_hierarchical(struct plan *plan, struct executor *exec, const struct group *group,
                                   const struct reduction *reduction, struct span_list *list)
{
    static const struct shards_work work = {.shard_nbytes = 2 << 20, .in_flight = SHARDS_IN_FLIGHT, .write = write_shard};
    struct reduction unscaled = *reduction;
    unscaled.postscale = 1.0;
    const bhvd_status status = shards_plan(exec, group, NULL, &unscaled, &work, list, plan);
    if (!status)
        plan->operands.reduction = *reduction;
    return status;
}
