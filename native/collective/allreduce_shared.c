// Allreduce in shared memory, in blocks of one slab: the block is cut into n chunks, member k stages all chunks but k for
// the others, reduces chunk k of all members, its own from where it lies, into its slab, and everyone collects the chunks.
// A short vector is one block that each member reduces by itself. Either way the sum is taken in rank order, so that the
// result depends neither on the path nor on what was fused with what, and is bit-equal on all ranks.
#include "collective/collective.h"
#include "run/shared.h"

enum {
    SMALL_BYTES = 4096          // up to this each member reduces everything: cheaper than a second hand-over
};

struct allreduce {
    struct run *run;
    struct group *group;
    const struct reduction *reduction;
    struct span_cursor in, own, out;
    size_t nbytes;
    kernel_copy_fn copy;
};

static size_t block_bytes(const struct allreduce *a, size_t block)
{
    return shared_piece(a->nbytes, block * HOST_SLAB_BYTES, HOST_SLAB_BYTES);
}

// Chunk boundaries of a block: multiples of the cache line where there is enough, so that members do not share lines.
static size_t chunk_begin(size_t nbytes, int index, int size)
{
    size_t lines = (nbytes + 63) / 64, begin = lines * (size_t)index / (size_t)size * 64;
    return begin < nbytes ? begin : nbytes;
}

static void stage(void *arg, size_t block)
{
    struct allreduce *a = arg;
    shared_stage(a->run, a->reduction, &a->in, shared_slab(a->run, a->group, a->group->rank, block), block_bytes(a, block));
}

// The own chunk is read where it lies, unless it is to be scaled first.
static bool own_is_staged(const struct allreduce *a) { return a->reduction->prescale != 1.0; }

static void stage_chunks(void *arg, size_t block)
{
    struct allreduce *a = arg;
    const int rank = a->group->rank, size = a->group->size;
    unsigned char *slab = shared_slab(a->run, a->group, rank, block);
    const size_t nbytes = block_bytes(a, block);
    const size_t begin = chunk_begin(nbytes, rank, size), end = chunk_begin(nbytes, rank + 1, size);
    shared_stage(a->run, a->reduction, &a->in, slab, own_is_staged(a) ? end : begin);
    if (!own_is_staged(a))
        span_cursor_skip(&a->in, end - begin);
    shared_stage(a->run, a->reduction, &a->in, slab + end, nbytes - end);
}

static void reduce_all(void *arg, size_t block)
{
    struct allreduce *a = arg;
    const unsigned char *src;
    unsigned char *dst;
    size_t offset = 0;
    for (size_t n; (n = span_cursor_next(&a->out, a->nbytes - offset, &src, &dst)); offset += n)
        shared_reduce(a->run, a->group, a->reduction, block, offset, NULL, dst, n);
}

// What a result overwrites in place was read just now, and is in the caches anyway.
static kernel_copy_fn copy_of(const struct allreduce *a, const unsigned char *src, const unsigned char *dst)
{
    return src == dst ? span_copy : a->copy;
}

// To the next destinations.
static void put(struct allreduce *a, const unsigned char *from, size_t nbytes)
{
    const unsigned char *src;
    unsigned char *dst;
    for (size_t n; (n = span_cursor_next(&a->out, nbytes, &src, &dst)); nbytes -= n, from += n)
        copy_of(a, src, dst)(dst, from, n);
}

// The sum goes to the others and to its own destination, while it is in the L1 cache.
static void reduce_chunk(void *arg, size_t block)
{
    struct allreduce *a = arg;
    const int rank = a->group->rank, size = a->group->size;
    unsigned char *slab = shared_slab(a->run, a->group, rank, block);
    const size_t nbytes = block_bytes(a, block), end = chunk_begin(nbytes, rank + 1, size);
    _Alignas(64) unsigned char sum[SHARED_L1_BYTES];
    const unsigned char *src;
    unsigned char *dst;
    size_t at = chunk_begin(nbytes, rank, size);
    span_cursor_skip(&a->own, at);
    for (size_t n; (n = span_cursor_next(&a->own, shared_piece(end, at, SHARED_L1_BYTES), &src, &dst)); at += n) {
        unsigned char *to = a->run->writes.streamed ? sum : slab + at;
        shared_reduce(a->run, a->group, a->reduction, block, at, own_is_staged(a) ? NULL : src, to, n);
        if (to == sum)
            shared_put(a->run, slab + at, sum, n);
        copy_of(a, src, dst)(dst, to, n);
    }
    span_cursor_skip(&a->own, nbytes - end);
}

static void collect(void *arg, size_t block)
{
    struct allreduce *a = arg;
    const int size = a->group->size;
    const size_t nbytes = block_bytes(a, block);
    for (int i = 0; i < size; i++) {
        const size_t begin = chunk_begin(nbytes, i, size), chunk = chunk_begin(nbytes, i + 1, size) - begin;
        if (i == a->group->rank)
            span_cursor_skip(&a->out, chunk);
        else
            put(a, shared_slab(a->run, a->group, i, block) + begin, chunk);
    }
    // What the others read from this member: all chunks but its own, to reduce them, and the sum of its own.
    size_t own = chunk_begin(nbytes, a->group->rank + 1, size) - chunk_begin(nbytes, a->group->rank, size);
    run_shared_bytes(a->run, nbytes - own + ((size_t)size - 1) * own);
    a->run->payload_received += nbytes - own + ((size_t)size - 1) * own;
}

bhvd_status allreduce_shared(struct run *run, struct group *group, const struct reduction *reduction,
                             const struct span_list *list)
{
    const struct span_cursor begin = span_cursor_at(list, 0);
    struct allreduce a = {run, group, reduction, begin, begin, begin, list->nbytes, shared_copy(run, list->nbytes)};
    if (list->nbytes > SMALL_BYTES)
        return shared_run(run, group, shared_blocks(list->nbytes),
                          &(struct shared_steps){stage_chunks, reduce_chunk, collect, .root = 0}, &a);
    run_shared_bytes(run, ((size_t)group->size - 1) * list->nbytes);
    run->payload_received += ((size_t)group->size - 1) * list->nbytes;
    return shared_run(run, group, list->nbytes > 0, &(struct shared_steps){stage, NULL, reduce_all, .root = 0}, &a);
}
