// Two-level allgather (executor/two_level.h). Each part crosses to every other host once: member j sends it to the host's member j
// modulo the number of members there. Each host then distributes the received parts through shared memory. It begins with its own
// parts, while the others' are still on the wire. Hosts may hold different numbers of members.
// Cost: (h-1) parts out of every member, instead of one for each member elsewhere.
#include <stdlib.h>

#include "collective/collectives.h"
#include "collective/pipelines.h"
#include "executor/hierarchy.h"
#include "executor/two_level.h"

enum { SLICES = 16 };                   // at most, per part

// A round covers members of one host from `first` on; each member here distributes the part of one of them.
struct round {
    int host, first;
};

// A piece is one slice of the parts of one round. Pieces are ordered by round, then by slice.
struct allgather {
    struct two_level two_level;
    struct group *group;
    const struct hierarchy *h;
    const unsigned char *src;
    unsigned char *dst;
    size_t *offset;                     // by position: offset of its part in dst
    size_t slice, slices;               // bytes, whole segments; number per part
    struct round *rounds;
    size_t *local_part;                 // of a piece: bytes that each local member distributes
    struct allgather_pipeline distributing;
};

static struct round round_of(const struct allgather *g, size_t piece) { return g->rounds[piece / g->slices]; }

// A slice of the part of the member at this position in the group.
static struct byte_range slice_of(const struct allgather *g, size_t piece, int position)
{
    const size_t offset = piece % g->slices * g->slice;
    return (struct byte_range){offset, shared_piece(g->two_level.part[position], offset, g->slice)};
}

// The position of the member whose part a local member distributes; -1: none.
static int source_of(const struct allgather *g, struct round round, int index)
{
    const int member = round.first + index;
    return member < hierarchy_members_of(g->h, round.host) ? hierarchy_member(g->h, round.host, member) : -1;
}

// One slice of a round: sends this member's slice to one host (in that host's first round only), and receives the slice of the
// member of another host that maps to this member (index modulo the number of members here). The target moves to the next host, the
// source to the one before.
static bhvd_status inter_exchange(struct executor *exec, struct two_level *l, size_t piece, struct plan *plan)
{
    const struct allgather *g = (struct allgather *)l;
    const struct hierarchy *h = g->h;
    const struct round round = round_of(g, piece);
    const int from = source_of(g, round, h->index), to = (2 * h->host + h->hosts - round.host) % h->hosts;
    struct byte_range cut;
    (void)exec;
    if (round.host == h->host)
        return BHVD_OK;
    struct schedule *schedule = plan_begin(plan, g->group);
    const int peer = hierarchy_member(h, to, h->index % hierarchy_members_of(h, to));
    const struct byte_range own = slice_of(g, piece, g->group->rank);
    for (size_t s = 0; round.first == 0 && (cut = byte_range_segment(own, s)).nbytes; s++)
        schedule_send(schedule, peer, in_buffer(INPUT_BUFFER, cut.begin), cut.nbytes, STEP_NONE);
    for (size_t s = 0; from >= 0 && (cut = byte_range_segment(slice_of(g, piece, from), s)).nbytes; s++)
        schedule_receive(schedule, from, in_buffer(OUTPUT_BUFFER, g->offset[from] + cut.begin), cut.nbytes, STEP_NONE);
    plan->operands = (struct operands){.input = g->src, .output = g->dst};
    return BHVD_OK;
}

static struct pipeline *distribute(struct executor *exec, struct two_level *l, size_t piece)
{
    struct allgather *g = (struct allgather *)l;
    const struct round round = round_of(g, piece);
    const unsigned char *mine = g->dst;
    l->list.nbytes = 0;
    for (int i = 0; i < l->local->size; i++) {
        const int source = source_of(g, round, i);
        const struct byte_range slice = source >= 0 ? slice_of(g, piece, source) : (struct byte_range){0, 0};
        unsigned char *to = source >= 0 ? g->dst + g->offset[source] + slice.begin : NULL;
        g->local_part[i] = slice.nbytes;
        l->list.spans[i] = (struct span){NULL, to, slice.nbytes};
        l->list.nbytes += slice.nbytes;
        if (i == l->local->rank && slice.nbytes)
            mine = source == g->group->rank ? g->src + slice.begin : to;
    }
    allgather_begin(&g->distributing, exec, l->local, l->slot, mine, &l->list, g->local_part);
    return &g->distributing.pipeline;
}

static const struct two_level_ops OPS = {.inter_exchange = inter_exchange, .distribute = distribute};

// Lists the rounds, this host's first. rounds NULL: only counts them.
static size_t rounds_of(const struct hierarchy *h, struct round *rounds)
{
    size_t count = 0;
    for (int step = 0; step < h->hosts; step++) {
        const int host = (h->host + h->hosts - step) % h->hosts;
        for (int first = 0; first < hierarchy_members_of(h, host); first += h->local->size, count++)
            if (rounds)
                rounds[count] = (struct round){host, first};
    }
    return count;
}

// Allocates and fills the arrays indexed by member, and the rounds. False: out of memory.
static bool lay_out(struct allgather *g, const size_t *part, size_t rounds)
{
    struct two_level *l = &g->two_level;
    const size_t n = (size_t)g->group->size, members = (size_t)l->local->size;
    l->part = malloc((2 * n + members) * sizeof *part + rounds * sizeof *g->rounds);
    l->list = (struct span_list){.spans = malloc(members * sizeof(struct span)), .count = members, .capacity = members};
    if (!l->part || !l->list.spans)
        return false;
    g->offset = parts_keep(l->part, part, n);
    g->local_part = g->offset + n;
    g->rounds = (struct round *)(void *)(g->local_part + members);
    rounds_of(g->h, g->rounds);
    return true;
}

bhvd_status allgather_two_level(struct plan *plan, struct executor *exec, struct group *group, const void *src, void *dst,
                                   const size_t *part)
{
    const struct hierarchy *h = group->hierarchy;
    size_t longest = 0, total = 0;
    for (int i = 0; i < group->size; total += part[i++])
        longest = part[i] > longest ? part[i] : longest;
    const size_t slice = two_level_piece(longest, SLICES), slices = (longest + slice - 1) / slice, rounds = rounds_of(h, NULL);
    struct allgather *g = two_level_create(exec, sizeof *g, &OPS, h->local, total, rounds * slices, rounds * slices);
    if (!g)
        return exec->failure.status;
    g->group = group;
    g->h = h;
    g->src = src;
    g->dst = dst;
    g->slice = slice;
    g->slices = slices;
    return two_level_plan(exec, &g->two_level, lay_out(g, part, rounds), plan);
}
