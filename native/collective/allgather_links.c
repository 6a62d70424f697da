// Allgather over links. Direct: every member sends its part to every other; one hop, n-1 messages. Doubling (Bruck): in each round
// a member sends all the parts it has, so their number doubles; ceil(log2 n) hops and messages. Wire, either way: each part n-1
// times.
#include "collective/collectives.h"
#include "collective/schedules.h"

enum { MESSAGE_NS = 15000 };            // cost of a message at both ends, see docs/results/scaling.md

void schedule_allgather_direct(struct schedule *schedule, const size_t *part)
{
    const size_t mine = part[schedule->rank];
    struct part cut;
    size_t place = 0;
    for (int i = 0; i < schedule->size; place += part[i++]) {
        if (i == schedule->rank) {
            schedule_copy(schedule, in_space(IN_OUTPUT, place), in_space(IN_INPUT, 0), mine, STEP_NONE);
            continue;
        }
        for (size_t s = 0; (cut = part_segment((struct part){place, part[i]}, s)).nbytes; s++)
            schedule_receive(schedule, i, in_space(IN_OUTPUT, cut.begin), cut.nbytes, STEP_NONE);
    }
    // Each rank begins with a different peer.
    for (size_t s = 0; (cut = part_segment((struct part){0, mine}, s)).nbytes; s++)
        for (int i = 1; i < schedule->size; i++)
            schedule_send(schedule, (schedule->rank + i) % schedule->size, in_space(IN_INPUT, cut.begin), cut.nbytes, STEP_NONE);
}

// The range in the output of the parts of `count` members from `first` on.
static struct part parts_of(const size_t *part, int first, int count)
{
    struct part whole = {0, 0};
    for (int i = 0; i < first + count; i++)
        *(i < first ? &whole.begin : &whole.nbytes) += part[i];
    return whole;
}

// Sends or receives the parts of `count` members from `first` on, wrapping round the end, in the same messages on both sides.
// Returns the step after which all are done. there: the step after which this rank has the parts that it sends.
static int move(struct schedule *schedule, const size_t *part, int peer, int first, int count, int there, bool sends)
{
    const int n = schedule->size, up_to_end = count < n - first ? count : n - first;
    const struct part pieces[] = {parts_of(part, first, up_to_end), parts_of(part, 0, count - up_to_end)};
    int moved = STEP_NONE;
    struct part cut;
    for (int i = 0; i < 2; i++)
        for (size_t s = 0; (cut = part_segment(pieces[i], s)).nbytes; s++) {
            const struct place place = in_space(IN_OUTPUT, cut.begin);
            moved = schedule_both(schedule, moved, sends ? schedule_send(schedule, peer, place, cut.nbytes, there)
                                                         : schedule_receive(schedule, peer, place, cut.nbytes, STEP_NONE));
        }
    return moved;
}

void schedule_allgather_doubling(struct schedule *schedule, const size_t *part)
{
    const int n = schedule->size, me = schedule->rank;
    const struct part mine = parts_of(part, me, 1);
    int there = schedule_copy(schedule, in_space(IN_OUTPUT, mine.begin), in_space(IN_INPUT, 0), mine.nbytes, STEP_NONE);
    // Before a round this rank has the parts of `distance` members, starting with its own.
    for (int distance = 1; distance < n; distance *= 2) {
        const int count = distance < n - distance ? distance : n - distance, from = (me + distance) % n;
        move(schedule, part, (me - distance + n) % n, me, count, there, true);
        there = schedule_both(schedule, there, move(schedule, part, from, from, count, STEP_NONE, false));
    }
}

void allgather_schedule(struct schedule *schedule, const struct wire *wire, const size_t *part)
{
    const double hop = wire_hop_ns(wire);
    size_t nbytes = 0;
    const int rounds = doubling_rounds(schedule->size);
    for (int i = 0; i < schedule->size; i++)
        nbytes += part[i];
    if (nbytes <= SCHEDULE_SEGMENT && rounds * (hop + MESSAGE_NS) < hop + (schedule->size - 1) * MESSAGE_NS)
        schedule_allgather_doubling(schedule, part);
    else
        schedule_allgather_direct(schedule, part);
}
