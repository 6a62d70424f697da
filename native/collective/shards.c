#include "collective/shards.h"

#include <stdlib.h>

static size_t piece_nbytes(const struct shards *x) { return x->shard_nbytes * (size_t)x->h->shards; }

static size_t pieces_of(const struct shards *x) { return (x->nbytes + piece_nbytes(x) - 1) / piece_nbytes(x); }

static struct byte_range piece_of(const struct shards *x, size_t piece)
{
    const size_t begin = piece * piece_nbytes(x);
    return (struct byte_range){begin, size_piece(x->nbytes, begin, piece_nbytes(x))};
}

// This rank's shard of a piece.
static struct byte_range mine_of(const struct shards *x, size_t piece)
{
    const struct byte_range whole = piece_of(x, piece), mine = hierarchy_shard(x->h, whole.nbytes, x->h->index);
    return (struct byte_range){whole.begin + mine.begin, mine.nbytes};
}

// Shards in flight come first in the scratch memory.
static struct location place_of(const struct shards *x, size_t piece)
{
    return in_buffer(SCRATCH_BUFFER, piece % x->in_flight * size_round_up(x->shard_nbytes, CACHE_LINE));
}

// ----------------------------------------------------------------------------------------------------------- schedule

// Returns the step after which the piece may be distributed.
static int begin_piece(const void *arg, struct schedule *schedule, size_t number, int after)
{
    const struct shards *x = arg;
    const struct byte_range mine = mine_of(x, number);
    const struct location shard = place_of(x, number);
    const int reduced = schedule_reduce_within(schedule, (int)number, shard, mine.nbytes, piece_of(x, number), after);
    size_t *scratch = &x->scratch[number % x->in_flight];
    if (!mine.nbytes)
        return reduced;
    // The last piece is shorter, and may be exchanged in another way, with more scratch memory.
    if (number < x->in_flight || number == pieces_of(x) - 1)
        *scratch = schedule_scratch_end(schedule);
    const struct schedule_part part = {(int)number, reduced, {shard, shard, shard, in_buffer(SCRATCH_BUFFER, *scratch)}};
    schedule_begin_part(schedule, &part);
    x->work->write(x, schedule, mine);
    return schedule_end_part(schedule);
}

static int end_piece(const void *arg, struct schedule *schedule, size_t number, int exchanged)
{
    const struct shards *x = arg;
    return schedule_distribute_within(schedule, (int)number, place_of(x, number), mine_of(x, number).nbytes, piece_of(x, number),
                                      exchanged);
}

void schedule_shards(struct schedule *schedule, const struct shards *x)
{
    schedule->buffer_nbytes[SCRATCH_BUFFER] = place_of(x, x->in_flight - 1).offset + x->shard_nbytes;
    schedule_pieces(schedule, pieces_of(x), x->in_flight, begin_piece, end_piece, x);
}

// ----------------------------------------------------------------------------------------------------------- operands

static void run_custom_step(void *arg, const struct step *step, unsigned char *const *buffers)
{
    const struct shards *x = arg;
    const struct byte_range mine = mine_of(x, (size_t)step->number);
    unsigned char *place = location_pointer(buffers, place_of(x, (size_t)step->number));
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
        reducescatter_begin(&x->reducing, x->h->local, slot, &x->reduction, &x->piece, shard, x->part);
        return &x->reducing.pipeline;
    }
    allgather_begin(&x->distributing, exec, x->h->local, slot, shard, &x->piece, x->part);
    return &x->distributing.pipeline;
}

bhvd_status shards_plan(struct executor *exec, const struct group *group, const struct collective *coll,
                        const struct reduction *reduction, const struct shards_work *work, struct span_list *list,
                        struct plan *plan)
{
    const struct hierarchy *h = group->hierarchy;
    const size_t spans = list->count, sizes = SHARDS_IN_FLIGHT + (size_t)h->local->size;
    struct shards *x = malloc(sizeof *x + spans * sizeof(struct span) + sizes * sizeof *x->part);
    if (!x)
        return executor_fail(exec, BHVD_ERR_SYSTEM, "no memory for an operation of %zu bytes", list->nbytes);
    struct span *memory = (struct span *)(x + 1);
    *x = (struct shards){.h = h, .work = work, .nbytes = list->nbytes, .scratch = (size_t *)(memory + spans), .exec = exec,
                         .coll = coll, .network = exec->network, .reduction = *reduction, .list = &plan->list,
                         .piece = {.spans = memory, .capacity = spans}};
    x->shard_nbytes = size_min(work->shard_nbytes, hierarchy_shard(h, list->nbytes, 0).nbytes);
    x->in_flight = size_min(work->in_flight, pieces_of(x));
    x->part = x->scratch + SHARDS_IN_FLIGHT;
    plan->list = *list;
    *list = (struct span_list){0};
    plan->release = free;
    plan->operands = (struct operands){.run_custom_step = run_custom_step, .begin_pipeline = begin_pipeline, .local = h->local,
                                       .arg = x, .exclusive_memory = coll ? collective_exclusive_memory(coll) : NULL};
    schedule_shards(plan_begin(plan, hierarchy_senders(h)), x);
    return BHVD_OK;
}
