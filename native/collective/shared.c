#include "collective/shared.h"

#include "core/progress.h"

enum { PIECE_BYTES = 16384 };   // a partial sum stays in the L1 cache

struct arrival {
    const struct process_set *set;
    int index;                  // everyone before it has arrived
};

static _Atomic uint64_t *flag_of(bhvd_context *ctx, const struct process_set *set, int index)
{
    return &host_memory_flag(&ctx->connections.host, set->id, set->local_indices[index])->value;
}

unsigned char *shared_slab(bhvd_context *ctx, const struct process_set *set, int index)
{
    return host_memory_slab(&ctx->connections.host, set->id, set->local_indices[index], set->slab);
}

void shared_next_block(struct process_set *set) { set->slab ^= 1; }

static int all_arrived(bhvd_context *ctx, void *arg)
{
    struct arrival *a = arg;
    for (; a->index < a->set->size; a->index++) {
        if (a->index == a->set->rank || atomic_load(flag_of(ctx, a->set, a->index)) >= a->set->barrier)
            continue;
        const struct link *link = collective_link(ctx, a->set, a->index);
        if (link->state != LINK_LEFT)
            return 0;
        // It left, so its flag is final; look once more, since it may have left just after the look above.
        if (atomic_load(flag_of(ctx, a->set, a->index)) >= a->set->barrier)
            continue;
        context_fail(ctx, BHVD_ERR_PEER_LOST, "rank %d left the job while an operation still needed it", link->rank);
        return -1;
    }
    return 1;
}

bhvd_status shared_barrier(bhvd_context *ctx, struct process_set *set)
{
    struct arrival arrival = {set, 0};
    set->barrier++;
    atomic_store(flag_of(ctx, set, set->rank), set->barrier);
    for (int i = 0; i < set->size; i++) {
        if (i != set->rank)
            bell_ring(&collective_link(ctx, set, i)->bell, 0);
    }
    if (all_arrived(ctx, &arrival) > 0)
        return BHVD_OK;
    return progress_until(ctx, all_arrived, &arrival, set->ranks[arrival.index]);
}

void shared_stage(const struct reduction *reduction, struct span_cursor *cursor, unsigned char *dst, size_t nbytes)
{
    const size_t element = bhvd_dtype_size(reduction->dtype);
    const unsigned char *src;
    unsigned char *unused;
    if (reduction->prescale == 1.0) {
        span_pack(cursor, dst, nbytes);
        return;
    }
    for (size_t n; (n = span_cursor_next(cursor, nbytes, &src, &unused)); nbytes -= n, dst += n)
        reduction->scale(dst, src, reduction->prescale, n / element);
}

static size_t min_size(size_t a, size_t b) { return a < b ? a : b; }

void shared_reduce(bhvd_context *ctx, const struct process_set *set, const struct reduction *reduction, size_t offset,
                   unsigned char *dst, size_t nbytes)
{
    const size_t element = bhvd_dtype_size(reduction->dtype);
    _Alignas(64) unsigned char partial[PIECE_BYTES];
    while (nbytes) {
        size_t n = min_size(nbytes, PIECE_BYTES), count = n / element;
        if (set->size == 1)
            memcpy(dst, shared_slab(ctx, set, 0) + offset, n);
        // The last addition goes to dst; only then may the own slab, which dst can lie in, be overwritten.
        const unsigned char *sum = shared_slab(ctx, set, 0) + offset;
        for (int i = 1; i < set->size; i++) {
            unsigned char *to = i == set->size - 1 ? dst : partial;
            reduction->reduce(to, sum, shared_slab(ctx, set, i) + offset, count);
            sum = to;
        }
        if (reduction->postscale != 1.0)
            reduction->scale(dst, dst, reduction->postscale, count);
        offset += n;
        dst += n;
        nbytes -= n;
    }
}
