// Two-level reducescatter (executor/two_level.h), for hosts that hold equally many members. Within each host, member i gets the
// host's sums of the parts of the i-th members of all hosts; these exchange and add the sums across hosts. A piece is a slice
// of every part.
// Cost: N (h-1)/h elements each way per host of h, instead of N for each of its members.
#include <stdlib.h>

#include "base/size.h"
#include "collective/collectives.h"
#include "collective/pipelines.h"
#include "collective/schedules.h"
#include "executor/hierarchy.h"
#include "executor/two_level.h"

enum {
    SUMS_BYTES = 2 << 20,               // per member and piece ...
    SLICE_MIN_BYTES = 64 << 10,         // ... unless with many hosts the slices would be shorter than this
    DEPTH = 4
};

struct reducescatter {
    struct two_level two_level;
    const struct hierarchy *h;
    struct reduction within, across;
    const unsigned char *src;
    unsigned char *dst;
    size_t *offset;                     // by position: offset of its part in src
    size_t slice;                       // bytes, whole cache lines
    size_t *local_part, *cross_part;    // of a piece: by local member, bytes for all hosts' members with its index; by host
    struct reducescatter_pipeline reducing;
};

// A slice of this member's part.
static struct byte_range slice_of(const struct reducescatter *r, size_t piece, int member)
{
    const size_t offset = piece * r->slice;
    return (struct byte_range){r->offset[member] + offset, shared_piece(r->two_level.part[member], offset, r->slice)};
}

static unsigned char *sums_of(const struct reducescatter *r, size_t piece)
{
    return r->two_level.memory + piece % r->two_level.depth * (size_t)r->h->hosts * r->slice;
}

static struct pipeline *reduce(struct executor *exec, struct two_level *l, size_t piece)
{
    struct reducescatter *r = (struct reducescatter *)l;
    const struct hierarchy *h = r->h;
    struct span_list *list = &l->list;      // in the order of the local members that receive the slices
    (void)exec;
    list->count = list->nbytes = 0;
    for (int index = 0; index < l->local->size; index++) {
        r->local_part[index] = 0;
        for (int host = 0; host < h->hosts; host++) {
            const struct byte_range slice = slice_of(r, piece, hierarchy_member(h, host, index));
            list->spans[list->count++] = (struct span){r->src + slice.begin, NULL, slice.nbytes};
            list->nbytes += slice.nbytes;
            r->local_part[index] += slice.nbytes;
        }
    }
    reducescatter_begin(&r->reducing, l->local, l->slot, &r->within, list, sums_of(r, piece), r->local_part);
    return &r->reducing.pipeline;
}

static bhvd_status inter_exchange(struct executor *exec, struct two_level *l, size_t piece, struct plan *plan)
{
    struct reducescatter *r = (struct reducescatter *)l;
    (void)exec;
    for (int host = 0; host < r->h->hosts; host++)
        r->cross_part[host] = slice_of(r, piece, hierarchy_member(r->h, host, r->h->index)).nbytes;
    schedule_reducescatter(plan_begin(plan, r->h->cross), r->cross_part, false);
    plan->operands = (struct operands){.reduction = r->across, .input = sums_of(r, piece), .output = r->dst + piece * r->slice};
    return BHVD_OK;
}

static const struct two_level_ops OPS = {.reduce = reduce, .inter_exchange = inter_exchange};

// Allocates the arrays indexed by member, and memory for the sums. False: out of memory.
static bool lay_out(struct executor *exec, struct reducescatter *r, const struct group *group, const size_t *part)
{
    struct two_level *l = &r->two_level;
    const size_t n = (size_t)group->size, hosts = (size_t)r->h->hosts;
    l->part = malloc((2 * n + (size_t)l->local->size + hosts) * sizeof *part);
    l->list = (struct span_list){.spans = malloc(n * sizeof(struct span)), .capacity = n};
    if (!l->part || !l->list.spans)
        return false;
    r->offset = parts_keep(l->part, part, n);
    r->cross_part = r->offset + n;
    r->local_part = r->cross_part + hosts;
    return !l->depth || (l->memory = executor_acquire(exec, l->depth * hosts * r->slice));
}

bhvd_status reducescatter_two_level(struct plan *plan, struct executor *exec, struct group *group,
                                       const struct reduction *reduction, const void *src, void *dst, const size_t *part)
{
    const struct hierarchy *h = group->hierarchy;
    const size_t even = SUMS_BYTES / (size_t)h->hosts / 64 * 64, most = even < SLICE_MIN_BYTES ? SLICE_MIN_BYTES : even;
    const size_t slice = part[0] < most ? size_round_up(part[0], CACHE_LINE) : most;
    const size_t count = part[0] ? (part[0] + slice - 1) / slice : 0;
    struct reducescatter *r = two_level_create(exec, sizeof *r, &OPS, h->local, part[0] * (size_t)group->size, count, DEPTH);
    if (!r)
        return exec->failure.status;
    r->h = h;
    r->within = r->across = *reduction;
    r->within.postscale = r->across.prescale = 1.0;
    r->src = src;
    r->dst = dst;
    r->slice = slice;
    return two_level_plan(exec, &r->two_level, lay_out(exec, r, group, part), plan);
}
