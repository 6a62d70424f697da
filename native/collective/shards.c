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
    const struct hierarchy *h;
    const struct shards_cut *cut;
    write_shard_fn write;
    const void *arg;
    size_t *scratch;                        // by place: memory of the shard's owners
};

// Returns the step after which the piece may be distributed.
static int begin_piece(const void *arg, struct schedule *schedule, size_t number, int after)
{
    const struct writer *w = arg;
    const struct byte_range piece = piece_of(w->h, w->cut, number), mine = hierarchy_shard(w->h, piece.nbytes, w->h->index);
    const size_t at = number % w->cut->in_flight;
    const struct location shard = in_buffer(SCRATCH_BUFFER, place_of(w->h, w->cut, number));
    const int reduced = schedule_reduce_within(schedule, (int)number, shard, mine.nbytes, piece, after);
    if (!mine.nbytes)
        return reduced;
    if (number < w->cut->in_flight) {       // the longest; test_schedules.c checks that shorter ones need no more
        const size_t after_shards = place_of(w->h, w->cut, w->cut->in_flight - 1) + shards_longest(w->h, w->cut);
        const size_t end = schedule_scratch_end(schedule);
        w->scratch[at] = size_round_up(end > after_shards ? end : after_shards, CACHE_LINE);
    }
    const struct schedule_part part = {(int)number, reduced, {shard, shard, shard, in_buffer(SCRATCH_BUFFER, w->scratch[at])}};
    schedule_begin_part(schedule, &part);
    w->write(w->arg, schedule, number, mine.nbytes);
    return schedule_end_part(schedule);
}

static int end_piece(const void *arg, struct schedule *schedule, size_t number, int exchanged)
{
    const struct writer *w = arg;
    const struct byte_range piece = piece_of(w->h, w->cut, number), mine = hierarchy_shard(w->h, piece.nbytes, w->h->index);
    const struct location shard = in_buffer(SCRATCH_BUFFER, place_of(w->h, w->cut, number));
    return schedule_distribute_within(schedule, (int)number, shard, mine.nbytes, piece, exchanged);
}

void schedule_shards(struct schedule *schedule, const struct hierarchy *h, const struct shards_cut *cut, write_shard_fn write,
                     const void *arg)
{
    size_t scratch[SHARDS_IN_FLIGHT];
    const struct writer w = {h, cut, write, arg, scratch};
    schedule_pieces(schedule, pieces_of(h, cut), cut->in_flight, begin_piece, end_piece, &w);
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
