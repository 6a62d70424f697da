// Hierarchical reducescatter, for hosts that hold equally many members. Within each host, member i gets the host's sums of the
// parts of the i-th members of all hosts; these exchange and add the sums across hosts. A piece is a slice of every part.
// Cost: N (h-1)/h elements each way per host of h, instead of N for each of its members.
#include <stdlib.h>

#include "base/size.h"
#include "collective/collectives.h"
#include "collective/pipelines.h"
#include "collective/schedules.h"
#include "executor/hierarchy.h"

enum {
    SUMS_BYTES = 2 << 20,               // per member and piece ...
    SLICE_MIN_BYTES = 64 << 10,         // ... unless with many hosts the slices would be shorter than this
    IN_FLIGHT = 4                       // pieces
};

struct reducescatter {
    const struct hierarchy *h;
    struct reduction within;
    const unsigned char *src;
    size_t *part, *offset;              // by position, offset: of its part in src
    size_t slice;                       // bytes, whole cache lines
    struct span_list list;              // of a piece, in the order of the local members that receive the slices
    size_t *local_part, *cross_part;    // of a piece: by local member, bytes for all hosts' members with its index; by host
    struct reducescatter_pipeline reducing;
};

// A slice of this member's part.
static struct byte_range slice_of(const struct reducescatter *r, int piece, int member)
{
    const size_t offset = (size_t)piece * r->slice;
    return (struct byte_range){r->offset[member] + offset, size_piece(r->part[member], offset, r->slice)};
}

static struct pipeline *begin_pipeline(void *arg, struct executor *exec, int slot, const struct step *step,
                                       unsigned char *const *buffers)
{
    struct reducescatter *r = arg;
    const struct hierarchy *h = r->h;
    (void)exec;
    r->list.count = 0;
    for (int index = 0; index < h->local->size; index++) {
        r->local_part[index] = 0;
        for (int host = 0; host < h->hosts; host++) {
            const struct byte_range slice = slice_of(r, step->number, hierarchy_member(h, host, index));
            r->list.spans[r->list.count++] = (struct span){r->src + slice.begin, NULL, slice.nbytes};
            r->local_part[index] += slice.nbytes;
        }
    }
    reducescatter_begin(&r->reducing, h->local, slot, &r->within, &r->list, location_pointer(buffers, step->to), r->local_part);
    return &r->reducing.pipeline;
}

// In flight, a piece has memory for its sums, and as much for the other hosts'.
static int write_piece(const void *arg, struct schedule *schedule, size_t piece, int after)
{
    const struct reducescatter *r = arg;
    const struct hierarchy *h = r->h;
    const size_t longest = (size_t)h->hosts * r->slice, place = piece % IN_FLIGHT * 2 * longest;
    const struct location to = in_buffer(SCRATCH_BUFFER, place);
    size_t sums = 0;
    for (int host = 0; host < h->hosts; host++)
        sums += r->cross_part[host] = slice_of(r, (int)piece, hierarchy_member(h, host, h->index)).nbytes;
    const struct byte_range values = {0, longest * (size_t)h->local->size};
    const struct schedule_part part = {
        .after = schedule_reduce_within(schedule, (int)piece, to, sums, values, after),
        .base = {[INPUT_BUFFER] = to, [OUTPUT_BUFFER] = in_buffer(OUTPUT_BUFFER, piece * r->slice),
                 [SCRATCH_BUFFER] = in_buffer(SCRATCH_BUFFER, place + longest)}};
    schedule_begin_part(schedule, &part);
    schedule_reducescatter(schedule, r->cross_part, false);
    return schedule_end_part(schedule);
}

bhvd_status reducescatter_hierarchical(struct plan *plan, struct executor *exec, const struct group *group,
                                       const struct reduction *reduction, const void *src, void *dst, const size_t *part)
{
    const struct hierarchy *h = group->hierarchy;
    const size_t even = SUMS_BYTES / (size_t)h->hosts / 64 * 64, most = even < SLICE_MIN_BYTES ? SLICE_MIN_BYTES : even;
    const size_t n = (size_t)group->size, hosts = (size_t)h->hosts, members = (size_t)h->local->size;
    struct reducescatter *r = malloc(sizeof *r + n * sizeof(struct span) + (2 * n + hosts + members) * sizeof *part);
    if (!r)
        return executor_fail(exec, BHVD_ERR_SYSTEM, "no memory for an operation of %d ranks", group->size);
    struct span *spans = (struct span *)(r + 1);
    *r = (struct reducescatter){.h = h, .within = *reduction, .src = src, .list = {.spans = spans, .capacity = n},
                                .slice = part[0] < most ? size_round_up(part[0], CACHE_LINE) : most,
                                .part = (size_t *)(spans + n)};
    r->within.postscale = 1.0;
    r->offset = parts_keep(r->part, part, n);
    r->cross_part = r->offset + n;
    r->local_part = r->cross_part + hosts;
    plan->release = free;
    plan->operands = (struct operands){.reduction = *reduction, .output = dst, .begin_pipeline = begin_pipeline,
                                       .local = h->local, .arg = r};
    schedule_pieces(plan_begin(plan, h->cross), part[0] ? (part[0] + r->slice - 1) / r->slice : 0, IN_FLIGHT, write_piece, NULL, r);
    return BHVD_OK;
}
