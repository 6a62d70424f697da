#include "collective/shards.h"

#include <stdlib.h>

#include "base/size.h"

static size_t piece_nbytes(const struct hierarchy *h, const struct shards_cut *cut)
{
    return cut->shard_nbytes * (size_t)h->shards;
}

size_t shards_longest(const struct hierarchy *h, const struct shards_cut *cut)
{
    return hierarchy_shard(h, size_min(cut->nbytes, piece_nbytes(h, cut)), 0).nbytes;
}

static size_t pieces_of(const struct hierarchy *h, const struct shards_cut *cut)
{
    return (cut->nbytes + piece_nbytes(h, cut) - 1) / piece_nbytes(h, cut);
}

static struct byte_range piece_of(const struct hierarchy *h, const struct shards_cut *cut, size_t piece)
{
    const size_t begin = piece * piece_nbytes(h, cut);
    return (struct byte_range){begin, shared_piece(cut->nbytes, begin, piece_nbytes(h, cut))};
}

// Shards in flight come first in the scratch memory.
static size_t place_of(const struct hierarchy *h, const struct shards_cut *cut, size_t piece)
{
    return piece % cut->in_flight * size_round_up(shards_longest(h, cut), CACHE_LINE);
}

// ----------------------------------------------------------------------------------------------------------- schedule

struct writer {
    struct schedule *schedule;
    const struct hierarchy *h;
    const struct shards_cut *cut;
    write_shard_fn write;
    const void *arg;
    // Of the pieces in flight:
    size_t scratch[SHARDS_IN_FLIGHT];       // memory of the shard's owners
    int exchanged[SHARDS_IN_FLIGHT];        // the step after which it may be distributed
};

static void begin_piece(struct writer *w, size_t number)
{
    const struct byte_range piece = piece_of(w->h, w->cut, number), mine = hierarchy_shard(w->h, piece.nbytes, w->h->index);
    const size_t at = number % w->cut->in_flight;
    const struct location shard = in_buffer(SCRATCH_BUFFER, place_of(w->h, w->cut, number));
    const int reduced = schedule_reduce_within(w->schedule, (int)number, shard, mine.nbytes, piece, STEP_NONE);
    w->exchanged[at] = reduced;
    if (!mine.nbytes)
        return;
    if (number < w->cut->in_flight) {       // the longest; test_schedules.c checks that shorter ones need no more
        const size_t after_shards = place_of(w->h, w->cut, w->cut->in_flight - 1) + shards_longest(w->h, w->cut);
        const size_t end = schedule_scratch_end(w->schedule);
        w->scratch[at] = size_round_up(end > after_shards ? end : after_shards, CACHE_LINE);
    }
    const struct schedule_part part = {(int)number, reduced, {shard, shard, shard, in_buffer(SCRATCH_BUFFER, w->scratch[at])}};
    schedule_begin_part(w->schedule, &part);
    w->write(w->arg, w->schedule, number, mine.nbytes);
    w->exchanged[at] = schedule_end_part(w->schedule);
}

static void end_piece(struct writer *w, size_t number)
{
    const struct byte_range piece = piece_of(w->h, w->cut, number), mine = hierarchy_shard(w->h, piece.nbytes, w->h->index);
    const struct location shard = in_buffer(SCRATCH_BUFFER, place_of(w->h, w->cut, number));
    const int exchanged = w->exchanged[number % w->cut->in_flight];
    schedule_distribute_within(w->schedule, (int)number, shard, mine.nbytes, piece, exchanged);
}

void schedule_shards(struct schedule *schedule, const struct hierarchy *h, const struct shards_cut *cut, write_shard_fn write,
                     const void *arg)
{
    struct writer w = {.schedule = schedule, .h = h, .cut = cut, .write = write, .arg = arg};
    const size_t pieces = pieces_of(h, cut);
    for (size_t i = 0; i < pieces + cut->in_flight; i++) {
        if (i >= cut->in_flight && i - cut->in_flight < pieces)
            end_piece(&w, i - cut->in_flight);
        if (i < pieces)
            begin_piece(&w, i);
    }
}

// ----------------------------------------------------------------------------------------------------------- operands

struct byte_range shards_mine(const struct shards *x, size_t piece)
{
    const struct byte_range whole = piece_of(x->h, &x->cut, piece), mine = hierarchy_shard(x->h, whole.nbytes, x->h->index);
    return (struct byte_range){whole.begin + mine.begin, mine.nbytes};
}

struct span shards_span(const struct shards *x, size_t piece, unsigned char *const *buffers)
{
    unsigned char *shard = buffers[SCRATCH_BUFFER] + place_of(x->h, &x->cut, piece);
    return (struct span){shard, shard, shards_mine(x, piece).nbytes};
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

struct shards *shards_plan(struct executor *exec, const struct group *group, const struct collective *coll,
                           const struct reduction *within, size_t shard_nbytes, size_t in_flight, struct span_list *list,
                           struct plan *plan)
{
    const struct hierarchy *h = group->hierarchy;
    const size_t spans = list->count;
    struct shards *x = malloc(sizeof *x + spans * sizeof(struct span) + (size_t)h->local->size * sizeof *x->part);
    if (!x) {
        executor_fail(exec, BHVD_ERR_SYSTEM, "no memory for an operation of %zu bytes", list->nbytes);
        return NULL;
    }
    struct span *memory = (struct span *)(x + 1);
    *x = (struct shards){.exec = exec, .h = h, .coll = coll, .network = exec->network, .within = *within, .list = &plan->list,
                         .cut = {list->nbytes, shard_nbytes, in_flight}, .piece = {.spans = memory, .capacity = spans},
                         .part = (size_t *)(memory + spans)};
    x->cut.in_flight = size_min(in_flight, pieces_of(h, &x->cut));
    plan_begin(plan, hierarchy_senders(h));
    plan->list = *list;
    *list = (struct span_list){0};
    plan->release = free;
    plan->operands = (struct operands){.begin_pipeline = begin_pipeline, .local = h->local, .arg = x};
    return x;
}
