#include "collective/shards.h"

#include <stdlib.h>

#include "base/size.h"

static size_t piece_nbytes(const struct hierarchy *h, const struct shards_cut *cut)
{
    return cut->shard_nbytes * (size_t)h->shards;
}

static size_t pieces_of(const struct hierarchy *h, const struct shards_cut *cut)
{
    return (cut->nbytes + piece_nbytes(h, cut) - 1) / piece_nbytes(h, cut);
}

static struct byte_range piece_of(const struct hierarchy *h, const struct shards_cut *cut, size_t piece)
{
    const size_t begin = piece * piece_nbytes(h, cut);
    return (struct byte_range){begin, size_piece(cut->nbytes, begin, piece_nbytes(h, cut))};
}

// This rank's shard of a piece.
static struct byte_range mine_of(const struct hierarchy *h, const struct shards_cut *cut, size_t piece)
{
    const struct byte_range whole = piece_of(h, cut, piece), mine = hierarchy_shard(h, whole.nbytes, h->index);
    return (struct byte_range){whole.begin + mine.begin, mine.nbytes};
}

// Shards in flight come first in the scratch memory.
static size_t place_of(const struct shards_cut *cut, size_t piece)
{
    return piece % cut->in_flight * size_round_up(cut->shard_nbytes, CACHE_LINE);
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
    const struct byte_range mine = mine_of(w->h, w->cut, number);
    const struct location shard = in_buffer(SCRATCH_BUFFER, place_of(w->cut, number));
    const int reduced = schedule_reduce_within(schedule, (int)number, shard, mine.nbytes, piece_of(w->h, w->cut, number), after);
    size_t *scratch = &w->scratch[number % w->cut->in_flight];
    if (!mine.nbytes)
        return reduced;
    // The last piece is shorter, and may be exchanged in another way, with more scratch memory.
    if (number < w->cut->in_flight || number == pieces_of(w->h, w->cut) - 1)
        *scratch = schedule_scratch_end(schedule);
    const struct schedule_part part = {(int)number, reduced, {shard, shard, shard, in_buffer(SCRATCH_BUFFER, *scratch)}};
    schedule_begin_part(schedule, &part);
    w->write(w->arg, schedule, mine);
    return schedule_end_part(schedule);
}

static int end_piece(const void *arg, struct schedule *schedule, size_t number, int exchanged)
{
    const struct writer *w = arg;
    const struct location shard = in_buffer(SCRATCH_BUFFER, place_of(w->cut, number));
    return schedule_distribute_within(schedule, (int)number, shard, mine_of(w->h, w->cut, number).nbytes,
                                      piece_of(w->h, w->cut, number), exchanged);
}

void schedule_shards(struct schedule *schedule, const struct hierarchy *h, const struct shards_cut *cut, write_shard_fn write,
                     const void *arg)
{
    size_t scratch[SHARDS_IN_FLIGHT];
    const struct writer w = {h, cut, write, arg, scratch};
    schedule->buffer_nbytes[SCRATCH_BUFFER] = place_of(cut, cut->in_flight - 1) + cut->shard_nbytes;
    schedule_pieces(schedule, pieces_of(h, cut), cut->in_flight, begin_piece, end_piece, &w);
}

// ----------------------------------------------------------------------------------------------------------- operands

static void run_custom_step(void *arg, const struct step *step, unsigned char *const *buffers)
{
    const struct shards *x = arg;
    const struct byte_range mine = mine_of(x->h, &x->cut, (size_t)step->number);
    unsigned char *place = buffers[SCRATCH_BUFFER] + place_of(&x->cut, (size_t)step->number);
    struct span shard = {place, place, mine.nbytes};
    x->work->run_custom_step(x, mine, &(struct span_list){&shard, 1, 1, mine.nbytes}, step, buffers);
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

bhvd_status shards_plan(struct executor *exec, const struct group *group, const struct collective *coll,
                        const struct reduction *within, const struct shards_work *work, struct span_list *list, struct plan *plan)
{
    const struct hierarchy *h = group->hierarchy;
    const size_t spans = list->count;
    struct shards *x = malloc(sizeof *x + spans * sizeof(struct span) + (size_t)h->local->size * sizeof *x->part);
    if (!x)
        return executor_fail(exec, BHVD_ERR_SYSTEM, "no memory for an operation of %zu bytes", list->nbytes);
    struct span *memory = (struct span *)(x + 1);
    *x = (struct shards){.exec = exec, .h = h, .coll = coll, .work = work, .network = exec->network, .within = *within,
                         .list = &plan->list, .piece = {.spans = memory, .capacity = spans}, .part = (size_t *)(memory + spans)};
    x->cut = (struct shards_cut){list->nbytes, size_min(work->shard_nbytes, hierarchy_shard(h, list->nbytes, 0).nbytes), 0};
    x->cut.in_flight = size_min(work->in_flight, pieces_of(h, &x->cut));
    plan->list = *list;
    *list = (struct span_list){0};
    plan->release = free;
    plan->operands = (struct operands){.run_custom_step = run_custom_step, .begin_pipeline = begin_pipeline, .local = h->local,
                                       .arg = x, .exclusive_memory = coll ? collective_exclusive_memory(coll) : NULL};
    schedule_shards(plan_begin(plan, hierarchy_senders(h)), h, &x->cut, work->write, x);
    return BHVD_OK;
}
