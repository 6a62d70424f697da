// Allgather in shared memory: everyone stages the next piece of its part and copies the others' pieces to their places.
#include "collective/shared.h"

// Copies to the vector's destinations, from `place` on.
static void put(kernel_copy_fn copy, const struct span_list *dst, size_t place, const unsigned char *from, size_t nbytes)
{
    const unsigned char *unused;
    unsigned char *to;
    struct span_cursor cursor = span_cursor_at(dst, place);
    for (size_t n; (n = span_cursor_next(&cursor, nbytes, &unused, &to)); nbytes -= n, from += n) {
        if (to != from)
            copy(to, from, n);
    }
}

struct allgather {
    bhvd_context *ctx;
    struct process_set *set;
    const unsigned char *src;
    const struct span_list *dst;
    const size_t *part;
    kernel_copy_fn copy;
};

static size_t piece_bytes(const struct allgather *g, int index, size_t block)
{
    return shared_piece(g->part[index], block * HOST_SLAB_BYTES, HOST_SLAB_BYTES);
}

static void stage(void *arg, size_t block)
{
    const struct allgather *g = arg;
    collective_copy(shared_slab(g->ctx, g->set, g->set->rank, block), g->src + block * HOST_SLAB_BYTES,
                    piece_bytes(g, g->set->rank, block));
}

static void collect(void *arg, size_t block)
{
    const struct allgather *g = arg;
    for (int k = 1; k < g->set->size; k++) {
        int i = (g->set->rank + k) % g->set->size;      // each rank begins with another one
        size_t place = block * HOST_SLAB_BYTES;
        for (int j = 0; j < i; j++)
            place += g->part[j];
        put(g->copy, g->dst, place, shared_slab(g->ctx, g->set, i, block), piece_bytes(g, i, block));
    }
}

bhvd_status allgather_shared(bhvd_context *ctx, struct process_set *set, const void *src, const struct span_list *dst,
                             const size_t *part)
{
    struct allgather g = {ctx, set, src, dst, part, NULL};
    size_t longest = 0, total = 0, my_place = 0;
    for (int i = 0; i < set->size; i++) {
        longest = part[i] > longest ? part[i] : longest;
        my_place += i < set->rank ? part[i] : 0;
        total += part[i];
    }
    g.copy = shared_copy(ctx, total);
    put(g.copy, dst, my_place, src, part[set->rank]);
    ctx->counters.payload_bytes_sent += part[set->rank] * (size_t)(set->size - 1);
    ctx->counters.payload_bytes_received += total - part[set->rank];
    size_t blocks = set->size > 1 ? shared_blocks(longest) : 0;
    return shared_run(ctx, set, blocks, &(struct shared_steps){stage, NULL, collect, .root = 0}, &g);
}
