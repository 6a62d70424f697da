// Ring allreduce (Patarasu and Yuan, 2009). Ranks form a ring; the vector is cut into n chunks.
//
//     n-1 steps reduce-scatter:  send chunk (r - s), receive chunk (r - s - 1) and add the own one; after the last step
//                                rank r holds the sum of chunk r + 1
//     n-1 steps allgather:       send the finished chunk (r + 1 - s), receive chunk (r - s)
//
// Chunks are sent in segments, each forwarded once it is added, through all 2 (n-1) steps without a break: additions overlap with
// the wire in both directions. Every tensor byte is read when its segment is first needed and written when its segment is final, so
// packing and unpacking overlap with the wire too.
// Cost: 2 N (n-1)/n elements per rank, 2 (n-1) latencies. The order of additions differs from chunk to chunk, but every chunk
// is finished by one rank and copied, so all ranks end bit-equal.
#include "collective/schedules.h"

enum { SEGMENTS_IN_FLIGHT = 8 };  // received segments that wait to be added, at most

// Chunk indices wrap round the ring.
static struct byte_range chunk(size_t nbytes, size_t element, int index, int n)
{
    const int at = (index % n + n) % n;
    const size_t begin = vector_chunk(nbytes, element, at, n);
    return (struct byte_range){begin, vector_chunk(nbytes, element, at + 1, n) - begin};
}

void schedule_allreduce_ring(struct schedule *schedule, size_t nbytes, size_t element)
{
    const int n = schedule->size, r = schedule->rank, next = (r + 1) % n, previous = (r + n - 1) % n, steps = 2 * (n - 1);
    const struct byte_range first = chunk(nbytes, element, r, n);
    struct byte_range range;
    for (size_t i = 0; (range = byte_range_segment(first, i)).nbytes; i++)
        schedule_send(schedule, next, in_buffer(FUSION_BUFFER, range.begin), range.nbytes,
                      schedule_load(schedule, range, STEP_NONE));
    int added[SEGMENTS_IN_FLIGHT];  // the last step that read each scratch slot
    for (int slot = 0; slot < SEGMENTS_IN_FLIGHT; slot++)
        added[slot] = STEP_NONE;
    int arrived = 0;
    for (int s = 0; s < steps; s++) {
        const bool adds = s < n - 1, is_final = s >= n - 2, goes_on = s < steps - 1;
        const struct byte_range whole = chunk(nbytes, element, adds ? r - s - 1 : r - (s - (n - 1)), n);
        for (size_t i = 0; (range = byte_range_segment(whole, i)).nbytes; i++) {
            const struct location own = in_buffer(FUSION_BUFFER, range.begin);
            int done;
            if (adds) {
                const int slot = arrived++ % SEGMENTS_IN_FLIGHT;
                const struct location received = in_buffer(SCRATCH_BUFFER, (size_t)slot * SCHEDULE_SEGMENT);
                done = schedule_receive(schedule, previous, received, range.nbytes, added[slot]);
                done = schedule_load(schedule, range, done);
                added[slot] = done = schedule_reduce(schedule, own, own, received, range.nbytes, done);
                if (is_final)
                    done = schedule_scale(schedule, own, range.nbytes, done);
            } else {
                done = schedule_receive(schedule, previous, own, range.nbytes, STEP_NONE);
            }
            if (goes_on)
                schedule_send(schedule, next, own, range.nbytes, done);
            if (is_final)
                schedule_store(schedule, range, done);
        }
    }
}
