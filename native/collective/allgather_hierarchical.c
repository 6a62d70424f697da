// Hierarchical allgather. Each part crosses to every other host once: member j sends it to the host's member j modulo the number of
// members there. Each host then distributes the received parts through shared memory. It begins with its own parts, while the
// others' are still on the wire. Hosts may hold different numbers of members.
// Cost: (h-1) parts out of every member, instead of one for each member elsewhere.
#include <stdlib.h>

#include "base/size.h"
#include "collective/collectives.h"
#include "collective/pipelines.h"
#include "executor/hierarchy.h"

enum { SLICES = 16 };                   // at most, per part

// A round covers members of one host from `first` on; each member here distributes the part of one of them.
struct round {
    int host, first;
};

// A piece is one slice of the parts of one round. Pieces are ordered by round, then by slice.
struct allgather {
    const struct group *group;
    const struct hierarchy *h;
    size_t *part, *offset;              // by position, offset: of its part in the output
    size_t slice, slices;               // bytes, whole segments; number per part
    struct round *rounds;               // at most one per member
    struct span_list list;              // of a piece: where each local member's goes ...
    size_t *local_part;                 // ... and its bytes
    struct allgather_pipeline distributing;
};

static struct round round_of(const struct allgather *g, int piece) { return g->rounds[(size_t)piece / g->slices]; }

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
    struct byte_range cut;
    int there = STEP_NONE;
    if (round.host == h->host)
        return STEP_NONE;
    for (size_t s = 0; round.first == 0 && (cut = byte_range_segment(own, s)).nbytes; s++)
        schedule_send(schedule, peer, in_buffer(INPUT_BUFFER, cut.begin), cut.nbytes, STEP_NONE);
    for (size_t s = 0; (cut = byte_range_segment(theirs, s)).nbytes; s++) {
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

// Lists the rounds, this host's first, and returns their number.
static size_t list_rounds(const struct hierarchy *h, struct round *rounds)
{
    size_t count = 0;
    for (int step = 0; step < h->hosts; step++) {
        const int host = (h->host + h->hosts - step) % h->hosts;
        for (int first = 0; first < hierarchy_members_of(h, host); first += h->local->size)
            rounds[count++] = (struct round){host, first};
    }
    return count;
}

bhvd_status allgather_hierarchical(struct plan *plan, struct executor *exec, const struct group *group, const void *src, void *dst,
                                   const size_t *part)
{
    const struct hierarchy *h = group->hierarchy;
    const size_t n = (size_t)group->size, members = (size_t)h->local->size;
    size_t longest = 0;
    for (int i = 0; i < group->size; i++)
        longest = part[i] > longest ? part[i] : longest;
    struct allgather *g = malloc(sizeof *g + members * sizeof(struct span) + (2 * n + members) * sizeof *part +
                                 n * sizeof *g->rounds);
    if (!g)
        return executor_fail(exec, BHVD_ERR_SYSTEM, "no memory for an operation of %d ranks", group->size);
    struct span *spans = (struct span *)(g + 1);
    *g = (struct allgather){.group = group, .h = h, .slice = schedule_piece(longest, SLICES), .part = (size_t *)(spans + members),
                            .list = {.spans = spans, .count = members, .capacity = members}};
    g->slices = (longest + g->slice - 1) / g->slice;
    g->offset = parts_keep(g->part, part, n);
    g->local_part = g->offset + n;
    g->rounds = (struct round *)(void *)(g->local_part + members);
    const size_t rounds = list_rounds(h, g->rounds);
    struct schedule *schedule = plan_begin(plan, group);
    for (int piece = 0; piece < (int)(rounds * g->slices); piece++) {
        const struct byte_range most = {0, members * size_min(longest, g->slice)};
        schedule_distribute_within(schedule, piece, in_buffer(OUTPUT_BUFFER, 0), 0, most, exchange(schedule, g, piece));
    }
    plan->release = free;
    plan->operands = (struct operands){.input = src, .output = dst, .begin_pipeline = begin_pipeline, .local = h->local, .arg = g};
    return BHVD_OK;
}
