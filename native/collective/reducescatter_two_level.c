// Two-level reducescatter, for hosts that hold equally many members. Within each host, member i gets the host's sums of the
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
    return (struct byte_range){r->offset[member] + offset, shared_piece(r->part[member], offset, r->slice)};
}

static struct pipeline *begin_pipeline(void *arg, struct executor *exec, int slot, const struct step *step,
                                       unsigned char *const *buffers)
{
    struct reducescatter *r = arg;
    const struct hierarchy *h = r->h;
    (void)exec;
    r->list.count = r->list.nbytes = 0;
    for (int index = 0; index < h->local->size; index++) {
        r->local_part[index] = 0;
        for (int host = 0; host < h->hosts; host++) {
            const struct byte_range slice = slice_of(r, step->number, hierarchy_member(h, host, index));
            r->list.spans[r->list.count++] = (struct span){r->src + slice.begin, NULL, slice.nbytes};
            r->list.nbytes += slice.nbytes;
            r->local_part[index] += slice.nbytes;
        }
    }
    reducescatter_begin(&r->reducing, h->local, slot, &r->within, &r->list, location_pointer(buffers, step->to), r->local_part);
    return &r->reducing.pipeline;
}

static void write_down(struct schedule *schedule, const struct reducescatter *r, int pieces)
{
    const struct hierarchy *h = r->h;
    size_t place[IN_FLIGHT] = {0};      // of a piece in flight: its sums, followed by scratch memory
    int exchanged[IN_FLIGHT];
    for (int piece = 0; piece < pieces; piece++) {
        const int at = piece % IN_FLIGHT, after = piece < IN_FLIGHT ? STEP_NONE : exchanged[at];
        size_t sums = 0, all = 0;
        for (int host = 0; host < h->hosts; host++)
            sums += r->cross_part[host] = slice_of(r, piece, hierarchy_member(h, host, h->index)).nbytes;
        for (int member = 0; member < h->hosts * h->local->size; member++)
            all += slice_of(r, piece, member).nbytes;
        if (piece < IN_FLIGHT)
            place[at] = schedule_scratch_end(schedule);
        const struct location to = in_buffer(SCRATCH_BUFFER, place[at]);
        const struct schedule_part part = {
            .after = schedule_reduce_within(schedule, piece, to, sums, (struct byte_range){0, all}, after),
            .base = {[INPUT_BUFFER] = to, [OUTPUT_BUFFER] = in_buffer(OUTPUT_BUFFER, (size_t)piece * r->slice),
                     [SCRATCH_BUFFER] = in_buffer(SCRATCH_BUFFER, place[at] + size_round_up(sums, CACHE_LINE))}};
        schedule_begin_part(schedule, &part);
        schedule_reducescatter(schedule, r->cross_part, false);
        exchanged[at] = schedule_end_part(schedule);
    }
}

bhvd_status reducescatter_two_level(struct plan *plan, struct executor *exec, const struct group *group,
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
    write_down(plan_begin(plan, h->cross), r, part[0] ? (int)((part[0] + r->slice - 1) / r->slice) : 0);
    return BHVD_OK;
}
