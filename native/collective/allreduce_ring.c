// Ring allreduce over links (Patarasu and Yuan, 2009). Ranks stand in a ring; the vector is cut into n chunks.
//
//     n-1 steps reduce-scatter:  send chunk (r - s), receive chunk (r - s - 1) and add the own one; after the last step
//                                rank r holds the sum of chunk r + 1
//     n-1 steps allgather:       send the finished chunk (r + 1 - s), receive chunk (r - s)
//
// Chunks travel in segments, each passed on as soon as it was added, through all 2 (n-1) steps without a break: what one
// rank adds and what is on the wire in either direction overlap. Every tensor byte is read when its segment is first
// needed and written when its segment is final, so packing and unpacking overlap with the wire as well.
// Wire: 2 N (n-1)/n elements per rank, 2 (n-1) hops. The order of additions differs from chunk to chunk, but every chunk
// is finished by one rank and copied, so all ranks end bit-equal.
#include <stdlib.h>

#include "collective/collective.h"
#include "run/vector.h"

enum {
    SEGMENT_BYTES = 256 * 1024,
    WINDOW = 8                  // receives posted ahead, so that the socket is read while a segment is added
};

struct chunk {
    size_t begin, end;          // bytes
};

// Chunks are counted round the ring.
static struct chunk chunk_of(size_t nbytes, size_t element, int index, int size)
{
    int at = (index % size + size) % size;
    return (struct chunk){vector_chunk(nbytes, element, at, size), vector_chunk(nbytes, element, at + 1, size)};
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

// One segment received from the previous rank, and what is done with it.
struct arrival {
    struct chunk part;
    bool adds;                  // the own values; else it is final
    bool passes_on;
};

struct ring_walk {
    struct run *run;
    struct link *next, *previous;
    struct vector vector;
    const struct reduction *reduction;
    unsigned char *received;    // WINDOW segments
    struct arrival *arrivals;   // in the order in which they come
    struct transfer *receives, *sends;
    size_t expected, posted, sent;
};

static void ring_send(struct ring_walk *ring, struct chunk part)
{
    link_post_send(ring->next, &ring->sends[ring->sent++], ring->vector.data + part.begin, part.end - part.begin);
}

static unsigned char *received_at(const struct ring_walk *ring, size_t index)
{
    return ring->received + index % WINDOW * SEGMENT_BYTES;
}

static void ring_post_receives(struct ring_walk *ring, size_t until)
{
    for (; ring->posted < ring->expected && ring->posted < until; ring->posted++) {
        const struct arrival *a = &ring->arrivals[ring->posted];
        void *to = a->adds ? received_at(ring, ring->posted) : ring->vector.data + a->part.begin;
        link_post_recv(ring->previous, &ring->receives[ring->posted], to, a->part.end - a->part.begin);
    }
}

// A segment came: adds it, passes it on, writes it where it is final.
static void ring_take(struct ring_walk *ring, size_t index, bool last_addition)
{
    const struct arrival *a = &ring->arrivals[index];
    const size_t nbytes = a->part.end - a->part.begin, count = nbytes / ring->vector.element;
    unsigned char *own = ring->vector.data + a->part.begin;
    if (a->adds) {
        vector_load(&ring->vector, ring->reduction, a->part.begin, nbytes);
        ring->reduction->reduce(own, own, received_at(ring, index), count);
        if (last_addition && ring->reduction->postscale != 1.0)
            ring->reduction->scale(own, own, ring->reduction->postscale, count);
    }
    if (a->passes_on)
        ring_send(ring, a->part);
    if (!a->adds || last_addition)
        vector_store(&ring->vector, a->part.begin, nbytes);
}

static bhvd_status ring_run(struct ring_walk *ring, struct chunk first, size_t last_additions)
{
    bhvd_status status = BHVD_OK;
    ring_post_receives(ring, WINDOW);
    for (size_t s = 0; s < segment_count(first); s++) {
        struct chunk part = segment_of(first, s);
        vector_load(&ring->vector, ring->reduction, part.begin, part.end - part.begin);
        ring_send(ring, part);
        run_look(ring->run);
    }
    for (size_t i = 0; i < ring->expected && !status; i++) {
        status = run_transfers(ring->run, &ring->receives[i], 1);
        if (status)
            break;
        ring_take(ring, i, i >= last_additions);
        ring_post_receives(ring, i + 1 + WINDOW);
    }
    return status ? status : run_transfers(ring->run, ring->sends, (int)ring->sent);
}

bhvd_status allreduce_ring(struct run *run, struct group *group, const struct reduction *reduction,
                           const struct span_list *list)
{
    const int n = group->size, r = group->rank;
    const size_t element = bhvd_dtype_size(reduction->dtype);
    struct ring_walk ring = {
        .run = run,
        .next = group_link(run, group, (r + 1) % n),
        .previous = group_link(run, group, (r + n - 1) % n),
        .reduction = reduction,
    };
    const size_t longest = segment_count(chunk_of(list->nbytes, element, 0, n)), most = 2 * (size_t)n * longest;
    ring.received = fusion_acquire(run, 1, WINDOW * SEGMENT_BYTES);
    ring.arrivals = malloc(most * sizeof *ring.arrivals);
    ring.receives = malloc(2 * most * sizeof *ring.receives);
    ring.sends = ring.receives + most;
    if (!vector_init(&ring.vector, run, list, element) || !ring.received || !ring.arrivals || !ring.receives) {
        free(ring.arrivals);
        free(ring.receives);
        return run_fail(run, BHVD_ERR_SYSTEM, "no memory for a fusion buffer of %zu bytes", list->nbytes);
    }
    size_t last_additions = 0;          // the arrivals from here on
    for (int step = 0; step < 2 * (n - 1); step++) {
        bool adds = step < n - 1;
        struct chunk chunk = chunk_of(list->nbytes, element, adds ? r - step - 1 : r - (step - (n - 1)), n);
        if (step == n - 2)
            last_additions = ring.expected;
        for (size_t s = 0; s < segment_count(chunk); s++)
            ring.arrivals[ring.expected++] = (struct arrival){segment_of(chunk, s), adds, step < 2 * (n - 1) - 1};
    }
    bhvd_status status = ring_run(&ring, chunk_of(list->nbytes, element, r, n), last_additions);
    free(ring.arrivals);
    free(ring.receives);
    return status;
}
