// Reducescatter over links: every member sends every other its part, and adds the values that it receives in rank order.
// Cost: N (n-1)/n elements each way, one latency.
#include "collective/collectives.h"

#include <stdlib.h>

// Returns the step after which the scaled rank-order sum of one segment of the own part is in the scratch at `sum`.
static int add_all(struct schedule *schedule, struct byte_range cut, struct location own, struct location sum, size_t mine,
                   int own_is_there)
{
    struct location so_far = own;
    int done = own_is_there;
    for (int i = 0; i < schedule->size; i++) {
        struct location value = own;
        if (i != schedule->rank) {
            value = in_buffer(SCRATCH_BUFFER, (size_t)i * mine + cut.begin);
            done = schedule_both(schedule, done, schedule_receive(schedule, i, value, cut.nbytes, STEP_NONE));
        }
        if (i == 0) {
            so_far = value;
            continue;
        }
        done = schedule_reduce(schedule, sum, so_far, value, cut.nbytes, done);
        so_far = sum;
    }
    if (schedule->size == 1)
        done = schedule_copy(schedule, sum, own, cut.nbytes, done);
    return schedule_scale(schedule, sum, cut.nbytes, done);
}

void schedule_reducescatter(struct schedule *schedule, const size_t *part, bool loads)
{
    const int n = schedule->size, me = schedule->rank;
    const enum buffer_kind values = loads ? FUSION_BUFFER : INPUT_BUFFER;
    const size_t mine = part[me];
    size_t offset = 0, my_offset = 0;
    int all = STEP_NONE;            // after this step the input is read and the sums are complete: the result may be written
    for (int i = 0; i < n; offset += part[i++]) {
        if (i == me) {
            my_offset = offset;
            continue;
        }
        for_each_segment(cut, (struct byte_range){offset, part[i]}) {
            const int loaded = loads ? schedule_load(schedule, cut, STEP_NONE) : STEP_NONE;
            const int sent = schedule_send(schedule, i, in_buffer(values, cut.begin), cut.nbytes, loaded);
            all = schedule_both(schedule, all, sent);
        }
    }
    for_each_segment(cut, (struct byte_range){0, mine}) {
        const struct byte_range own = {my_offset + cut.begin, cut.nbytes};
        const struct location sum = in_buffer(SCRATCH_BUFFER, (size_t)me * mine + cut.begin);
        const int loaded = loads ? schedule_load(schedule, own, STEP_NONE) : STEP_NONE;
        all = schedule_both(schedule, all, add_all(schedule, cut, in_buffer(values, own.begin), sum, mine, loaded));
    }
    if (mine)
        schedule_copy(schedule, in_buffer(OUTPUT_BUFFER, 0), in_buffer(SCRATCH_BUFFER, (size_t)me * mine), mine, all);
}

// ---------------------------------------------------------------------------------------------------- in shared memory

// Reducescatter in shared memory. A block holds an equal piece of every member's part, so that all members reduce at the same time:
// member k reduces the k-th piece of all buffers straight into its output.

static void copy_in(struct executor *exec, struct pipeline *pipeline, size_t block)
{
    const struct reducescatter_pipeline *r = (const struct reducescatter_pipeline *)pipeline;
    const struct group *group = pipeline->group;
    unsigned char *buffer = shared_buffer(exec, pipeline, group->rank, block);
    size_t begin = 0, offset = block * r->piece;
    for (int i = 0; i < group->size; begin += r->part[i++]) {
        size_t n = size_piece(r->part[i], offset, r->piece);
        struct span_cursor cursor = span_cursor_at(r->src, begin + offset);
        if (i != group->rank || own_is_copied(r->reduction))
            shared_copy_in(exec, r->reduction, &cursor, buffer + (size_t)i * r->piece, n);
        if (i != group->rank)
            executor_count_shared(exec, n, 0);
    }
}

static void copy_out(struct executor *exec, struct pipeline *pipeline, size_t block)
{
    const struct reducescatter_pipeline *r = (const struct reducescatter_pipeline *)pipeline;
    const struct group *group = pipeline->group;
    const size_t offset = block * r->piece, mine = size_piece(r->part[group->rank], offset, r->piece);
    struct span_cursor cursor = span_cursor_at(r->src, r->own + offset);
    size_t at = 0;
    for (struct span s; (s = span_cursor_next(&cursor, mine - at)).nbytes; at += s.nbytes)
        shared_reduce(exec, pipeline, r->reduction, block, (size_t)group->rank * r->piece + at,
                      own_is_copied(r->reduction) ? NULL : s.src, r->dst + offset + at, s.nbytes);
    executor_count_shared(exec, 0, mine * (size_t)(group->size - 1));
}

static const struct shared_steps STEPS = {.copy_in = copy_in, .copy_out = copy_out};

void reducescatter_begin(struct reducescatter_pipeline *r, struct group *group, int slot, const struct reduction *reduction,
                         const struct span_list *src, void *dst, const size_t *part)
{
    size_t longest = 0;
    *r = (struct reducescatter_pipeline){.reduction = reduction, .src = src, .dst = dst, .part = part,
                                         .piece = SHM_BUFFER_BYTES / (size_t)group->size / 64 * 64};
    for (int i = 0; i < group->size; i++) {
        longest = part[i] > longest ? part[i] : longest;
        r->own += i < group->rank ? part[i] : 0;
    }
    pipeline_begin(&r->pipeline, group, slot, (longest + r->piece - 1) / r->piece, &STEPS);
}

bhvd_status reducescatter_shared(struct executor *exec, struct group *group, const struct reduction *reduction,
                                 const struct span_list *src, void *dst, const size_t *part)
{
    struct reducescatter_pipeline r;
    reducescatter_begin(&r, group, 0, reduction, src, dst, part);
    return pipeline_execute(exec, &r.pipeline);
}

// -------------------------------------------------------------------------------------------------------- hierarchical

// Hierarchical reducescatter, for hosts that hold equally many members. Within each host, member i gets the host's sums of the
// parts of the i-th members of all hosts; these exchange and add the sums across hosts. A piece is a slice of every part.
// Cost: N (h-1)/h elements each way per host of h, instead of N for each of its members.

enum {
    SUMS_BYTES = 2 << 20,               // per member and piece ...
    SLICE_MIN_BYTES = 64 << 10,         // ... unless with many hosts the slices would be shorter than this
    IN_FLIGHT = 4                       // pieces
};

struct reducescatter {
    const struct hierarchy *h;
    struct reduction reduction;
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
    reducescatter_begin(&r->reducing, h->local, slot, &r->reduction, &r->list, location_pointer(buffers, step->to), r->local_part);
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
    *r = (struct reducescatter){.h = h, .reduction = *reduction, .src = src, .list = {.spans = spans, .capacity = n},
                                .slice = part[0] < most ? size_round_up(part[0], CACHE_LINE) : most,
                                .part = (size_t *)(spans + n)};
    r->reduction.postscale = 1.0;
    r->offset = parts_keep(r->part, part, n);
    r->cross_part = r->offset + n;
    r->local_part = r->cross_part + hosts;
    plan->release = free;
    plan->operands = (struct operands){.reduction = *reduction, .output = dst, .begin_pipeline = begin_pipeline,
                                       .local = h->local, .arg = r};
    schedule_pieces(plan_begin(plan, h->cross), part[0] ? (part[0] + r->slice - 1) / r->slice : 0, IN_FLIGHT, write_piece, NULL, r);
    return BHVD_OK;
}
