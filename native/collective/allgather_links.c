// Allgather over links. Direct: every member sends its part to every other; one latency, n-1 messages. Bruck: in
// each round a member sends all the parts it has, so their number doubles; ceil(log2 n) latencies and messages. Cost, either
// way: each part n-1 times.
#include "collective/schedules.h"

enum { MESSAGE_NS = 15000 };            // cost of a message at both ends, see docs/results/scaling.md

void schedule_allgather_direct(struct schedule *schedule, const size_t *part)
{
    const size_t mine = part[schedule->rank];
    struct byte_range cut;
    size_t offset = 0;
    for (int i = 0; i < schedule->size; offset += part[i++]) {
        if (i == schedule->rank) {
            schedule_copy(schedule, in_buffer(OUTPUT_BUFFER, offset), in_buffer(INPUT_BUFFER, 0), mine, STEP_NONE);
            continue;
        }
        for (size_t s = 0; (cut = byte_range_segment((struct byte_range){offset, part[i]}, s)).nbytes; s++)
            schedule_receive(schedule, i, in_buffer(OUTPUT_BUFFER, cut.begin), cut.nbytes, STEP_NONE);
    }
    // Each rank begins with a different peer.
    for (size_t s = 0; (cut = byte_range_segment((struct byte_range){0, mine}, s)).nbytes; s++)
        for (int i = 1; i < schedule->size; i++)
            schedule_send(schedule, (schedule->rank + i) % schedule->size, in_buffer(INPUT_BUFFER, cut.begin), cut.nbytes,
                          STEP_NONE);
}

// The range in the output of the parts of `count` members from `first` on.
static struct byte_range parts_of(const size_t *part, int first, int count)
{
    struct byte_range whole = {0, 0};
    for (int i = 0; i < first + count; i++)
        *(i < first ? &whole.begin : &whole.nbytes) += part[i];
    return whole;
}

// Sends or receives the parts of `count` members from `first` on, wrapping round the end, in the same messages on both sides.
// Returns the step after which all are done. there: the step after which this rank has the parts that it sends.
static int move(struct schedule *schedule, const size_t *part, int peer, int first, int count, int there, bool sends)
{
    const int n = schedule->size, up_to_end = count < n - first ? count : n - first;
    const struct byte_range pieces[] = {parts_of(part, first, up_to_end), parts_of(part, 0, count - up_to_end)};
    int moved = STEP_NONE;
    struct byte_range cut;
    for (int i = 0; i < 2; i++)
        for (size_t s = 0; (cut = byte_range_segment(pieces[i], s)).nbytes; s++) {
            const struct location location = in_buffer(OUTPUT_BUFFER, cut.begin);
            moved = schedule_both(schedule, moved, sends ? schedule_send(schedule, peer, location, cut.nbytes, there)
                                                         : schedule_receive(schedule, peer, location, cut.nbytes, STEP_NONE));
        }
    return moved;
}

void schedule_allgather_bruck(struct schedule *schedule, const size_t *part)
{
    const int n = schedule->size, me = schedule->rank;
    const struct byte_range mine = parts_of(part, me, 1);
    int there = schedule_copy(schedule, in_buffer(OUTPUT_BUFFER, mine.begin), in_buffer(INPUT_BUFFER, 0), mine.nbytes, STEP_NONE);
    // Before a round this rank has the parts of `distance` members, starting with its own.
    for (int distance = 1; distance < n; distance *= 2) {
        const int count = distance < n - distance ? distance : n - distance, from = (me + distance) % n;
        move(schedule, part, (me - distance + n) % n, me, count, there, true);
        there = schedule_both(schedule, there, move(schedule, part, from, from, count, STEP_NONE, false));
    }
}

void allgather_schedule(struct schedule *schedule, const struct network_cost *network, const size_t *part)
{
    const double alpha = network_alpha_ns(network);
    size_t nbytes = 0;
    const int rounds = doubling_rounds(schedule->size);
    for (int i = 0; i < schedule->size; i++)
        nbytes += part[i];
    if (nbytes <= SCHEDULE_SEGMENT && rounds * (alpha + MESSAGE_NS) < alpha + (schedule->size - 1) * MESSAGE_NS)
        schedule_allgather_bruck(schedule, part);
    else
        schedule_allgather_direct(schedule, part);
}
