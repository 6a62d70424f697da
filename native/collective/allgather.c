// Allgather over links. Direct: every member sends its part to every other; one latency, n-1 messages. Bruck: in
// each round a member sends all the parts it has, so their number doubles; ceil(log2 n) latencies and messages. Cost, either
// way: each part n-1 times.
#include "collective/collectives.h"

#include <stdlib.h>

enum { MESSAGE_NS = 15000 };            // cost of a message at both ends, see docs/results/scaling.md

void schedule_allgather_direct(struct schedule *schedule, const size_t *part)
{
    const size_t mine = part[schedule->rank];
    size_t offset = 0;
    for (int i = 0; i < schedule->size; offset += part[i++]) {
        if (i == schedule->rank) {
            schedule_copy(schedule, in_buffer(OUTPUT_BUFFER, offset), in_buffer(INPUT_BUFFER, 0), mine, STEP_NONE);
            continue;
        }
        for_each_segment(cut, (struct byte_range){offset, part[i]})
            schedule_receive(schedule, i, in_buffer(OUTPUT_BUFFER, cut.begin), cut.nbytes, STEP_NONE);
    }
    // Each rank begins with a different peer.
    for_each_segment(cut, (struct byte_range){0, mine})
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
    for (int i = 0; i < 2; i++)
        for_each_segment(cut, pieces[i]) {
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

// -------------------------------------------------------------------------------------------------------- hierarchical

// Hierarchical allgather. Each part crosses to every other host once: member j sends it to the host's member j modulo the number of
// members there. Each host then distributes the received parts through shared memory. It begins with its own parts, while the
// others' are still on the wire. Hosts may hold different numbers of members.
// Cost: (h-1) parts out of every member, instead of one for each member elsewhere.

enum { SLICES = 16 };                   // at most, per part

// A piece is one slice of the parts of one round, which covers members of one host from `first` on; each member here distributes
// the part of one of them. Pieces are ordered by round, this host's first, then by slice.
struct allgather {
    const struct group *group;
    const struct hierarchy *h;
    size_t *part, *offset;              // by position, offset: of its part in the output
    size_t slice, slices;               // bytes, whole segments; number per part
    int rounds;                         // of the largest host; others need fewer
    struct span_list list;              // of a piece: where each local member's goes ...
    size_t *local_part;                 // ... and its bytes
    struct exchange_pipeline distributing;
};

struct round {
    int host, first;
};

static struct round round_of(const struct allgather *g, int piece)
{
    const int round = piece / (int)g->slices, hosts = g->h->hosts;
    return (struct round){(g->h->host + hosts - round / g->rounds) % hosts, round % g->rounds * g->h->local->size};
}

// A slice of the part of the member at this position in the group; nbytes 0 at position -1.
static struct byte_range slice_of(const struct allgather *g, int piece, int position)
{
    const size_t offset = (size_t)piece % g->slices * g->slice;
    return (struct byte_range){offset, position < 0 ? 0 : size_piece(g->part[position], offset, g->slice)};
}

// The position of the member whose part a local member distributes; -1: none.
static int source_of(const struct allgather *g, struct round round, int index)
{
    const int member = round.first + index;
    return member < hierarchy_members_of(g->h, round.host) ? hierarchy_member(g->h, round.host, member) : -1;
}

// Sends this member's slice to one host (in that host's first round only), and receives the slice of the member of another host
// that maps to this member (index modulo the number of members here). The target moves to the next host, the source to the one
// before. Returns the step after which the slice is there.
static int exchange(struct schedule *schedule, const struct allgather *g, int piece)
{
    const struct hierarchy *h = g->h;
    const struct round round = round_of(g, piece);
    const int from = source_of(g, round, h->index), to = (2 * h->host + h->hosts - round.host) % h->hosts;
    const int peer = hierarchy_member(h, to, h->index % hierarchy_members_of(h, to));
    const struct byte_range own = slice_of(g, piece, g->group->rank), theirs = slice_of(g, piece, from);
    int there = STEP_NONE;
    if (round.host == h->host)
        return STEP_NONE;
    if (round.first == 0)
        for_each_segment(cut, own)
            schedule_send(schedule, peer, in_buffer(INPUT_BUFFER, cut.begin), cut.nbytes, STEP_NONE);
    for_each_segment(cut, theirs) {
        const struct location place = in_buffer(OUTPUT_BUFFER, g->offset[from] + cut.begin);
        there = schedule_both(schedule, there, schedule_receive(schedule, from, place, cut.nbytes, STEP_NONE));
    }
    return there;
}

static struct pipeline *begin_pipeline(void *arg, struct executor *exec, int slot, const struct step *step,
                                       unsigned char *const *buffers)
{
    struct allgather *g = arg;
    const struct round round = round_of(g, step->number);
    const unsigned char *mine = buffers[OUTPUT_BUFFER];
    for (int i = 0; i < g->h->local->size; i++) {
        const int source = source_of(g, round, i);
        const struct byte_range slice = slice_of(g, step->number, source);
        unsigned char *to = slice.nbytes ? buffers[OUTPUT_BUFFER] + g->offset[source] + slice.begin : NULL;
        g->local_part[i] = slice.nbytes;
        g->list.spans[i] = (struct span){NULL, to, slice.nbytes};
        if (i == g->h->index && slice.nbytes)
            mine = source == g->group->rank ? buffers[INPUT_BUFFER] + slice.begin : to;
    }
    allgather_begin(&g->distributing, exec, g->h->local, slot, mine, &g->list, g->local_part);
    return &g->distributing.pipeline;
}

bhvd_status allgather_hierarchical(struct plan *plan, struct executor *exec, const struct group *group, const void *src, void *dst,
                                   const size_t *part)
{
    const struct hierarchy *h = group->hierarchy;
    const size_t n = (size_t)group->size, members = (size_t)h->local->size;
    size_t longest = 0;
    for (int i = 0; i < group->size; i++)
        longest = part[i] > longest ? part[i] : longest;
    struct allgather *g = malloc(sizeof *g + members * sizeof(struct span) + (2 * n + members) * sizeof *part);
    if (!g)
        return executor_fail(exec, BHVD_ERR_SYSTEM, "no memory for an operation of %d ranks", group->size);
    struct span *spans = (struct span *)(g + 1);
    *g = (struct allgather){.group = group, .h = h, .slice = schedule_piece(longest, SLICES), .part = (size_t *)(spans + members),
                            .rounds = (h->largest + h->local->size - 1) / h->local->size,
                            .list = {.spans = spans, .count = members, .capacity = members}};
    g->slices = (longest + g->slice - 1) / g->slice;
    g->offset = parts_keep(g->part, part, n);
    g->local_part = g->offset + n;
    struct schedule *schedule = plan_begin(plan, group);
    for (int piece = 0; piece < h->hosts * g->rounds * (int)g->slices; piece++) {
        const struct byte_range most = {0, members * size_min(longest, g->slice)};
        const struct round round = round_of(g, piece);
        if (round.first < hierarchy_members_of(h, round.host))
            schedule_distribute_within(schedule, piece, in_buffer(OUTPUT_BUFFER, 0), 0, most, exchange(schedule, g, piece));
    }
    plan->release = free;
    plan->operands = (struct operands){.input = src, .output = dst, .begin_pipeline = begin_pipeline, .local = h->local, .arg = g};
    return BHVD_OK;
}
