// Allreduce in two levels (hierarchy.h), for hosts with several members each:
//
//     reduce-scatter within each host, in shared memory:   local member s holds the host's sum of shard s
//     allreduce of shard s among its owners, over links:   every owner drives its own sockets
//     allgather within each host, in shared memory
//
// Wire: 2 N (h-1)/h elements each way per host of h, however many ranks it holds; a ring over all n ranks sends 2 N (n-1)/n
// over a host's link, and that in 2 (n-1) hops instead of 2 (h-1). A vector is worked off in pieces, of which a few are on the
// wire while others are reduced or spread within the hosts; and vectors go on beside each other, as tasks (run/task.h):
// none waits for a message or another member while something else can be done.
#include <stdlib.h>

#include "collective/collective.h"
#include "collective/passages.h"
#include "run/hierarchy.h"

enum {
    SHARD_BYTES = 2 << 20,              // of a piece
    LOCAL_BYTES = 256 << 10             // that are worked on within the host before links are looked at again
};

// A piece of the vector, from when its shard is reduced within the host until the result is spread there.
struct piece {
    struct span_list list;              // its spans
    size_t *part;                       // by local member: bytes of its shard
    struct span shard;                  // this member's
    struct span_list shard_list;
    struct plan plan;                   // between hosts
    struct flight *flight;              // NULL: none, or over
};

static bool piece_init(struct piece *piece, const struct hierarchy *h, size_t spans)
{
    piece->part = malloc((size_t)h->local->size * sizeof *piece->part);
    piece->list = (struct span_list){.spans = malloc(spans * sizeof(struct span)), .capacity = spans};
    return piece->part && piece->list.spans;
}

// What was between hosts is over, or the run has failed.
static void end_between(struct run *run, struct piece *piece)
{
    if (piece->flight)
        flight_drop(run, piece->flight);
    piece->flight = NULL;
    plan_fini(run, &piece->plan);
}

static void piece_fini(struct run *run, struct piece *piece)
{
    end_between(run, piece);
    free(piece->part);
    span_list_fini(&piece->list);
}

// Cuts the next piece off the vector.
static void cut(const struct hierarchy *h, struct piece *piece, struct span_cursor *cursor, size_t most)
{
    struct span *next = piece->list.spans;
    piece->list.count = piece->list.nbytes = 0;
    for (size_t n; (n = span_cursor_next(cursor, most - piece->list.nbytes, &next->src, &next->dst)); next++) {
        next->nbytes = n;
        piece->list.nbytes += n;
        piece->list.count++;
        if (piece->list.nbytes == most)
            break;
    }
    hierarchy_cut(h, piece->list.nbytes, piece->part);
    piece->shard.src = piece->shard.dst;
    piece->shard.nbytes = piece->part[h->index];
    piece->shard_list = (struct span_list){&piece->shard, 1, 1, piece->shard.nbytes};
}

// Within a host all members do the same in the same order: piece after piece is reduced, and once there are `depth` of them, the
// first is spread before the next is reduced.
struct levels {
    struct task task;
    struct group *local;
    const struct hierarchy *h;
    struct reduction within;
    struct between between;
    int lane;                           // of the group's area
    struct span_list list;
    struct span_cursor cursor;
    struct fusion_buffer memory;        // the shards
    size_t count, depth;                // pieces; begun and not ended, at most
    size_t reduced, spread;             // pieces that are
    struct passage *passage;            // of one of these; NULL: neither is under way
    struct reducescatter_passage reducing;
    struct allgather_passage spreading;
    struct piece pieces[BETWEEN_DEPTH];
};

static size_t piece_nbytes(const struct levels *l) { return l->between.shard_nbytes * (size_t)l->h->shards; }

static struct piece *piece_at(struct levels *l, size_t number) { return &l->pieces[number % l->depth]; }

static bool reduces_next(const struct levels *l) { return l->reduced < l->count && l->reduced < l->spread + l->depth; }

// May what is next begin? Passages of one lane follow each other: an earlier execution's come first.
static bool may_begin(struct levels *l)
{
    const void *user = l->local->users[l->lane];
    const struct flight *flight = piece_at(l, l->spread)->flight;
    return (!user || user == l) && (reduces_next(l) || !flight || flight_is_over(flight));
}

static void begin(struct run *run, struct levels *l)
{
    l->local->users[l->lane] = l;
    if (reduces_next(l)) {
        struct piece *piece = piece_at(l, l->reduced);
        cut(l->h, piece, &l->cursor, piece_nbytes(l));
        reducescatter_begin(&l->reducing, run, l->local, l->lane, &l->within, &piece->list, piece->shard.dst, piece->part);
        l->passage = &l->reducing.passage;
    } else {
        struct piece *piece = piece_at(l, l->spread);
        end_between(run, piece);
        allgather_begin(&l->spreading, run, l->local, l->lane, piece->shard.dst, &piece->list, piece->part);
        l->passage = &l->spreading.passage;
    }
}

static void start_between(struct run *run, struct levels *l, size_t number)
{
    struct piece *piece = piece_at(l, number);
    size_t begin = number * piece_nbytes(l);
    for (int i = 0; i < l->h->index; i++)
        begin += piece->part[i];
    if (!piece->shard.nbytes || l->between.plan(run, l->h, &piece->shard_list, begin, &l->between, &piece->plan) || !piece->plan.made)
        return;
    piece->plan.material.execution = l->task.execution;
    flight_start(run, l->h->cross, &piece->plan.schedule, &piece->plan.material, NULL, NULL, &piece->flight);
}

static void end(struct run *run, struct levels *l)
{
    passage_end(run, l->passage);
    if (l->passage == &l->reducing.passage)
        start_between(run, l, l->reduced++);
    else
        l->spread++;
    l->passage = NULL;
    l->task.is_over = l->spread == l->count;
    if (l->task.is_over)
        l->local->users[l->lane] = NULL;
}

static bool advance(struct run *run, struct task *task)
{
    struct levels *l = (struct levels *)task;
    bool progress = false;
    size_t nbytes = 0;
    task->awaited = -1;
    while (!task->is_over && nbytes < LOCAL_BYTES && !run->failure.status) {
        if (!l->passage && !may_begin(l))
            break;
        if (!l->passage)
            begin(run, l);
        if (passage_is_over(l->passage)) {
            end(run, l);
        } else if (passage_advance(run, l->passage)) {
            nbytes += l->list.nbytes < HOST_SLAB_BYTES ? l->list.nbytes : HOST_SLAB_BYTES;
        } else {
            task->awaited = l->local->ranks[l->passage->slowest];
            passage_can_advance(run, l->passage);       // has who is waited for left?
            break;
        }
        run->messages_moved++;
        progress = true;
    }
    return progress;
}

static bool can_advance(struct run *run, struct task *task)
{
    struct levels *l = (struct levels *)task;
    return l->passage ? passage_is_over(l->passage) || passage_can_advance(run, l->passage) : may_begin(l);
}

static void destroy(struct run *run, struct task *task)
{
    struct levels *l = (struct levels *)task;
    if (l->local->users[l->lane] == l)
        l->local->users[l->lane] = NULL;
    for (size_t i = 0; i < l->depth; i++)
        piece_fini(run, &l->pieces[i]);
    fusion_return(run, &l->memory);
    span_list_fini(&l->list);
    free(l);
}

// Of the largest shard.
static size_t shard_room(const struct levels *l)
{
    const size_t most = l->between.shard_nbytes;
    if (l->count > 1)
        return most;
    hierarchy_cut(l->h, l->list.nbytes, l->pieces[0].part);
    return (l->pieces[0].part[0] + 63) / 64 * 64;
}

static bool pieces_init(struct run *run, struct levels *l)
{
    for (size_t i = 0; i < l->depth; i++)
        if (!piece_init(&l->pieces[i], l->h, l->list.count))
            return false;
    const size_t room = shard_room(l);
    if (!fusion_borrow(run, l->depth * room, &l->memory))
        return false;
    for (size_t i = 0; i < l->depth; i++)
        l->pieces[i].shard.dst = (unsigned char *)l->memory.data + i * room;
    return true;
}

bhvd_status hierarchical_plan(struct plan *plan, struct run *run, struct group *group, const struct reduction *within,
                              struct span_list *list, const struct between *between)
{
    const struct hierarchy *h = group->hierarchy;
    struct levels *l = malloc(sizeof *l);
    if (!l)
        return run_fail(run, BHVD_ERR_SYSTEM, "no memory for an operation of %zu bytes", list->nbytes);
    *l = (struct levels){
        .task = {.advance = advance, .can_advance = can_advance, .destroy = destroy},
        .local = h->local, .h = h, .within = *within, .between = *between,
        .lane = 1 + (int)(run->connections.started % (HOST_LANES - 1)), .list = *list,
    };
    *list = (struct span_list){0};
    l->cursor = span_cursor_at(&l->list, 0);
    l->count = (l->list.nbytes + piece_nbytes(l) - 1) / piece_nbytes(l);
    l->depth = l->count < (size_t)between->depth ? l->count : (size_t)between->depth;
    if (!pieces_init(run, l)) {
        destroy(run, &l->task);
        return run_fail(run, BHVD_ERR_SYSTEM, "no memory for pieces of %zu bytes", between->shard_nbytes);
    }
    plan->made = true;
    plan->task = &l->task;
    return BHVD_OK;
}

// ----------------------------------------------------------------------------------------------------------- allreduce

static bhvd_status plan_shard(struct run *run, const struct hierarchy *h, const struct span_list *shard, size_t begin,
                              const struct between *between, struct plan *plan)
{
    (void)begin;
    allreduce_schedule(plan_begin(plan, h->cross), (enum allreduce_path)run->allreduce_path, &run->wire, shard->nbytes,
                       bhvd_dtype_size(between->reduction.dtype));
    plan->material = (struct material){.reduction = between->reduction, .list = shard};
    return BHVD_OK;
}

bhvd_status allreduce_hierarchical(struct plan *plan, struct run *run, struct group *group, const struct reduction *reduction,
                                   struct span_list *list)
{
    struct reduction within = *reduction;
    struct between between = {.plan = plan_shard, .reduction = *reduction, .shard_nbytes = SHARD_BYTES, .depth = BETWEEN_DEPTH};
    within.postscale = between.reduction.prescale = 1.0;
    return hierarchical_plan(plan, run, group, &within, list, &between);
}
