// Ring allreduce over links (Patarasu and Yuan, 2009). Ranks stand in a ring; the vector is cut into n chunks.
//
//     n-1 steps reduce-scatter:  send chunk (r - s), receive chunk (r - s - 1) and add the own one; after the last step
//                                rank r holds the sum of chunk r + 1
//     n-1 steps allgather:       send the finished chunk (r + 1 - s), receive chunk (r - s)
//
// Chunks travel in segments: while one is added, the next is on the wire, and what was added goes on at once.
// Wire: 2 N (n-1)/n elements per rank, 2 (n-1) hops. The order of additions differs from chunk to chunk, but every chunk
// is finished by one rank and copied, so all ranks end bit-equal.
#include <stdlib.h>

#include "collective/collective.h"
#include "core/progress.h"

enum { SEGMENT_BYTES = 256 * 1024 };

struct chunk {
    size_t begin, end;          // bytes
};

static struct chunk chunk_of(size_t nbytes, size_t element, int index, int size)
{
    size_t count = nbytes / element, at = (size_t)((index % size + size) % size);
    size_t base = count / (size_t)size, longer = count % (size_t)size;
    size_t begin = at * base + (at < longer ? at : longer);
    size_t end = begin + base + (at < longer);
    return (struct chunk){begin * element, end * element};
}

static size_t segment_count(struct chunk chunk)
{
    return (chunk.end - chunk.begin + SEGMENT_BYTES - 1) / SEGMENT_BYTES;
}

static struct chunk segment_of(struct chunk chunk, size_t index)
{
    size_t begin = chunk.begin + index * SEGMENT_BYTES, end = begin + SEGMENT_BYTES;
    return (struct chunk){begin, end < chunk.end ? end : chunk.end};
}

struct ring_walk {
    bhvd_context *ctx;
    struct link *next, *previous;
    const struct reduction *reduction;
    unsigned char *vector, *received;
    struct transfer *sends;     // every segment sent in the whole operation
    size_t posted;
    size_t nbytes, element;
    int rank, size;
};

static struct chunk ring_chunk(const struct ring_walk *ring, int index)
{
    return chunk_of(ring->nbytes, ring->element, index, ring->size);
}

static void ring_send(struct ring_walk *ring, struct chunk part)
{
    link_post_send(ring->next, &ring->sends[ring->posted++], ring->vector + part.begin, part.end - part.begin);
}

// One step: receives `chunk` from the previous rank into `to`, segment by segment, and passes each on when told to.
// adds: to the own values, so that the sum is passed on.
static bhvd_status ring_step(struct ring_walk *ring, struct chunk chunk, struct transfer *receives, bool adds, bool passes_on)
{
    size_t segments = segment_count(chunk);
    for (size_t s = 0; s < segments; s++) {
        struct chunk part = segment_of(chunk, s);
        unsigned char *to = adds ? ring->received + (part.begin - chunk.begin) : ring->vector + part.begin;
        link_post_recv(ring->previous, &receives[s], to, part.end - part.begin);
    }
    for (size_t s = 0; s < segments; s++) {
        struct chunk part = segment_of(chunk, s);
        bhvd_status status = progress_transfers(ring->ctx, &receives[s], 1);
        if (status)
            return status;
        unsigned char *own = ring->vector + part.begin;
        if (adds)
            ring->reduction->reduce(own, own, ring->received + (part.begin - chunk.begin),
                                    (part.end - part.begin) / ring->element);
        if (passes_on)
            ring_send(ring, part);
    }
    return BHVD_OK;
}

static bhvd_status ring_run(struct ring_walk *ring, struct transfer *receives)
{
    const int n = ring->size, r = ring->rank;
    bhvd_status status = BHVD_OK;
    struct chunk first = ring_chunk(ring, r);
    for (size_t s = 0; s < segment_count(first); s++)
        ring_send(ring, segment_of(first, s));
    for (int step = 0; step < n - 1 && !status; step++)
        status = ring_step(ring, ring_chunk(ring, r - step - 1), receives, true, step < n - 2);
    struct chunk mine = ring_chunk(ring, r + 1);
    if (ring->reduction->postscale != 1.0)
        ring->reduction->scale(ring->vector + mine.begin, ring->vector + mine.begin, ring->reduction->postscale,
                               (mine.end - mine.begin) / ring->element);
    for (size_t s = 0; s < segment_count(mine) && !status; s++)
        ring_send(ring, segment_of(mine, s));
    for (int step = 0; step < n - 1 && !status; step++)
        status = ring_step(ring, ring_chunk(ring, r - step), receives, false, step < n - 2);
    return status ? status : progress_transfers(ring->ctx, ring->sends, (int)ring->posted);
}

bhvd_status allreduce_ring(bhvd_context *ctx, struct process_set *set, const struct reduction *reduction,
                           const struct span_list *list)
{
    const int n = set->size;
    struct ring_walk ring = {
        .ctx = ctx,
        .next = collective_link(ctx, set, (set->rank + 1) % n),
        .previous = collective_link(ctx, set, (set->rank + n - 1) % n),
        .reduction = reduction,
        .nbytes = list->nbytes,
        .element = bhvd_dtype_size(reduction->dtype),
        .rank = set->rank,
        .size = n,
    };
    struct chunk longest = chunk_of(list->nbytes, ring.element, 0, n);
    size_t per_chunk = segment_count(longest);
    ring.vector = fusion_acquire(ctx, 0, list->nbytes);
    ring.received = fusion_acquire(ctx, 1, longest.end);
    struct transfer *transfers = calloc(per_chunk * (2 * (size_t)n + 1) + 1, sizeof *transfers);
    if (!ring.vector || !ring.received || !transfers) {
        free(transfers);
        return context_fail(ctx, BHVD_ERR_SYSTEM, "no memory for a fusion buffer of %zu bytes", list->nbytes);
    }
    ring.sends = transfers + per_chunk;
    struct span_cursor in = span_cursor_at(list, 0), out = span_cursor_at(list, 0);
    span_pack(&in, ring.vector, list->nbytes);
    if (reduction->prescale != 1.0)
        reduction->scale(ring.vector, ring.vector, reduction->prescale, list->nbytes / ring.element);
    bhvd_status status = ring_run(&ring, transfers);
    if (!status)
        span_unpack(&out, ring.vector, list->nbytes);
    free(transfers);
    return status;
}
