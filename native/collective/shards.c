#include "collective/shards.h"

#include <stdlib.h>

#include "base/size.h"

static size_t piece_nbytes(const struct hierarchy *h, const struct shards_cut *cut) { return cut->shard_nbytes * (size_t)h->shards; }

size_t shards_pieces(const struct hierarchy *h, const struct shards_cut *cut)
{
    return (cut->nbytes + piece_nbytes(h, cut) - 1) / piece_nbytes(h, cut);
}

size_t shards_longest(const struct hierarchy *h, const struct shards_cut *cut)
{
    return hierarchy_shard(h, size_min(cut->nbytes, piece_nbytes(h, cut)), 0).nbytes;
}

struct writer {
    struct schedule *schedule;
    const struct hierarchy *h;
    const struct shards_cut *cut;
    write_shard_fn write;
    void *arg;
    // Of the pieces in flight:
    size_t shard[SHARDS_IN_FLIGHT], scratch[SHARDS_IN_FLIGHT];  // where this rank's shard is, and the scratch memory of its owners
    int exchanged[SHARDS_IN_FLIGHT];                            // the step after which it may be distributed
};

static struct byte_range piece_of(const struct writer *w, size_t number)
{
    const size_t begin = number * piece_nbytes(w->h, w->cut);
    return (struct byte_range){begin, shared_piece(w->cut->nbytes, begin, piece_nbytes(w->h, w->cut))};
}

static void begin_piece(struct writer *w, size_t number)
{
    const struct byte_range piece = piece_of(w, number), mine = hierarchy_shard(w->h, piece.nbytes, w->h->index);
    const size_t at = number % w->cut->in_flight;
    if (number < w->cut->in_flight) {           // the largest that will be there
        w->shard[at] = schedule_scratch_end(w->schedule);
        w->scratch[at] = w->shard[at] + size_round_up(mine.nbytes, CACHE_LINE);
    }
    const struct location shard = in_buffer(SCRATCH_BUFFER, w->shard[at]), scratch = in_buffer(SCRATCH_BUFFER, w->scratch[at]);
    w->exchanged[at] = schedule_reduce_within(w->schedule, (int)number, shard, mine.nbytes, piece, STEP_NONE);
    if (!mine.nbytes)
        return;
    const struct schedule_part part = {
        .number = (int)number, .after = w->exchanged[at],
        .base = {[INPUT_BUFFER] = shard, [OUTPUT_BUFFER] = shard, [FUSION_BUFFER] = shard, [SCRATCH_BUFFER] = scratch}};
    schedule_begin_part(w->schedule, &part);
    w->write(w->arg, w->schedule, number, piece.begin + mine.begin, mine.nbytes);
    w->exchanged[at] = schedule_end_part(w->schedule);
}

static void end_piece(struct writer *w, size_t number)
{
    const struct byte_range piece = piece_of(w, number), mine = hierarchy_shard(w->h, piece.nbytes, w->h->index);
    const size_t at = number % w->cut->in_flight;
    schedule_distribute_within(w->schedule, (int)number, in_buffer(SCRATCH_BUFFER, w->shard[at]), mine.nbytes, piece, w->exchanged[at]);
}

void schedule_shards(struct schedule *schedule, const struct hierarchy *h, const struct shards_cut *cut, write_shard_fn write,
                     void *arg)
{
    struct writer w = {.schedule = schedule, .h = h, .cut = cut, .write = write, .arg = arg};
    const size_t pieces = shards_pieces(h, cut);
    for (size_t i = 0; i < pieces + cut->in_flight; i++) {
        if (i >= cut->in_flight && i - cut->in_flight < pieces)
            end_piece(&w, i - cut->in_flight);
        if (i < pieces)
            begin_piece(&w, i);
    }
}

static struct pipeline *begin_pipeline(void *arg, struct executor *exec, int slot, const struct step *step,
                                       unsigned char *const *buffers)
{
    struct shards *x = arg;
    struct span_cursor cursor = span_cursor_at(x->list, step->values.begin);
    unsigned char *shard = location_pointer(buffers, step->to);
    span_list_cut(&x->piece, &cursor, step->values.nbytes);
    hierarchy_cut(x->h, step->values.nbytes, x->part);
    if (step->kind == STEP_REDUCE_WITHIN) {
        reducescatter_begin(&x->reducing, x->h->local, slot, &x->within, &x->piece, shard, x->part);
        return &x->reducing.pipeline;
    }
    allgather_begin(&x->distributing, exec, x->h->local, slot, shard, &x->piece, x->part);
    return &x->distributing.pipeline;
}

void *shards_plan(struct executor *exec, const struct group *group, const struct reduction *within, struct span_list *list, size_t size,
                  struct plan *plan)
{
    const struct hierarchy *h = group->hierarchy;
    const size_t begin = size_round_up(size, CACHE_LINE), spans = list->count * sizeof(struct span);
    struct shards *x = calloc(1, begin + spans + (size_t)h->local->size * sizeof *x->part);
    if (!x) {
        executor_fail(exec, BHVD_ERR_SYSTEM, "no memory for an operation of %zu bytes", list->nbytes);
        return NULL;
    }
    plan_begin(plan, h->cross ? h->cross : h->local);
    plan->list = *list;
    *list = (struct span_list){0};
    plan->release = free;
    plan->operands = (struct operands){.begin_pipeline = begin_pipeline, .local = h->local, .arg = x};
    unsigned char *memory = (unsigned char *)x + begin;
    *x = (struct shards){.h = h, .within = *within, .list = &plan->list,
                         .piece = {.spans = (struct span *)(void *)memory, .capacity = plan->list.count},
                         .part = (size_t *)(void *)(memory + spans)};
    return x;
}
