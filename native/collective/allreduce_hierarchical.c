// Allreduce in two levels (hierarchy.h), for hosts with several members each:
//
//     reduce-scatter within each host, in shared memory:   local member s holds the host's sum of shard s
//     allreduce of shard s among its owners, over links:   every owner drives its own sockets
//     allgather within each host, in shared memory
//
// Wire: 2 N (h-1)/h elements each way per host of h, however many ranks it holds; a ring over all n ranks sends 2 N (n-1)/n
// over a host's link, and that in 2 (n-1) hops instead of 2 (h-1). A vector is worked off in pieces, of which a few are on the
// wire while others are reduced or spread within the hosts.
#include <stdlib.h>

#include "collective/collective.h"
#include "run/hierarchy.h"
#include "run/shared.h"

enum {
    DEPTH = 4,                          // pieces begun and not ended, at most
    SHARD_BYTES = 2 << 20,              // of a piece, where several are on the wire at once
    SHARD_ALONE_BYTES = 16 << 20        // and where each is waited for
};

// A piece of the vector, from when its shard is reduced within the host until the result is spread there.
struct piece {
    struct span_list list;              // its spans
    size_t *part;                       // by local member: bytes of its shard
    struct span shard;                  // this member's
    struct span_list shard_list;
    struct flight *flight;              // between hosts; NULL: none, or over
};

struct levels {
    struct run *run;
    const struct hierarchy *h;
    const struct reduction *within;
    hierarchical_fn between;
    void *arg;
    size_t shard_bytes;
    size_t depth;                       // pieces begun and not ended
    struct piece pieces[DEPTH];
};

// Cuts the next piece off the vector.
static void cut(const struct levels *l, struct piece *piece, struct span_cursor *cursor)
{
    const size_t most = l->shard_bytes * (size_t)l->h->shards;
    struct span *next = piece->list.spans;
    piece->list.count = piece->list.nbytes = 0;
    for (size_t n; (n = span_cursor_next(cursor, most - piece->list.nbytes, &next->src, &next->dst)); next++) {
        next->nbytes = n;
        piece->list.nbytes += n;
        piece->list.count++;
        if (piece->list.nbytes == most)
            break;
    }
    hierarchy_cut(l->h, piece->list.nbytes, piece->part);
}

// Reduces it within the host, and begins what is between hosts. begin: its place in the vector.
static bhvd_status begin_piece(struct levels *l, struct piece *piece, size_t begin)
{
    const struct hierarchy *h = l->h;
    const size_t mine = piece->part[h->index];
    bhvd_status status = reducescatter_shared(l->run, h->local, l->within, &piece->list, piece->shard.dst, piece->part);
    if (status || !mine)
        return status;
    piece->shard.src = piece->shard.dst;
    piece->shard.nbytes = mine;
    piece->shard_list = (struct span_list){&piece->shard, 1, 1, mine};
    for (int i = 0; i < h->index; i++)
        begin += piece->part[i];
    return l->between(l->run, h->cross, &piece->shard_list, begin, l->arg, &piece->flight);
}

static bhvd_status end_piece(struct levels *l, struct piece *piece)
{
    bhvd_status status = piece->flight ? flight_wait(l->run, piece->flight) : BHVD_OK;
    piece->flight = NULL;
    return status ? status : allgather_shared(l->run, l->h->local, piece->shard.dst, &piece->list, piece->part);
}

static bool levels_init(struct levels *l, size_t spans)
{
    const size_t members = (size_t)l->h->local->size;
    unsigned char *shards = fusion_acquire(l->run, 0, l->depth * l->shard_bytes);
    bool there = shards;
    for (size_t i = 0; i < l->depth; i++) {
        struct piece *piece = &l->pieces[i];
        piece->part = malloc(members * sizeof *piece->part);
        piece->list = (struct span_list){.spans = malloc(spans * sizeof(struct span)), .capacity = spans};
        piece->shard.dst = shards + i * l->shard_bytes;
        there = there && piece->part && piece->list.spans;
    }
    return there;
}

static void levels_fini(struct levels *l)
{
    for (int i = 0; i < DEPTH; i++) {
        if (l->pieces[i].flight)
            flight_wait(l->run, l->pieces[i].flight);       // of a run that has failed
        free(l->pieces[i].part);
        span_list_fini(&l->pieces[i].list);
    }
}

static bhvd_status run_pieces(struct levels *l, const struct span_list *list)
{
    struct span_cursor cursor = span_cursor_at(list, 0);
    const size_t most = l->shard_bytes * (size_t)l->h->shards, pieces = (list->nbytes + most - 1) / most;
    bhvd_status status = BHVD_OK;
    for (size_t i = 0; i < pieces + l->depth - 1 && !status; i++) {
        if (i < pieces) {
            cut(l, &l->pieces[i % l->depth], &cursor);
            status = begin_piece(l, &l->pieces[i % l->depth], i * most);
        }
        if (i >= l->depth - 1 && !status)
            status = end_piece(l, &l->pieces[(i - (l->depth - 1)) % l->depth]);
    }
    return status;
}

static bhvd_status run_levels(struct levels *l, const struct span_list *list)
{
    bhvd_status status = levels_init(l, list->count)
                             ? run_pieces(l, list)
                             : run_fail(l->run, BHVD_ERR_SYSTEM, "no memory for pieces of %zu fused tensors", list->count);
    levels_fini(l);
    return status;
}

bhvd_status hierarchical_run(struct run *run, struct group *group, const struct reduction *within,
                             const struct span_list *list, hierarchical_fn between, void *arg)
{
    struct levels levels = {.run = run, .h = group->hierarchy, .within = within, .between = between, .arg = arg,
                            .shard_bytes = SHARD_ALONE_BYTES, .depth = 1};
    return run_levels(&levels, list);
}

static bhvd_status start_shard(struct run *run, struct group *cross, const struct span_list *shard, size_t begin, void *arg,
                               struct flight **flight)
{
    const struct reduction *across = arg;
    struct schedule schedule;
    (void)begin;
    schedule_init(&schedule, cross->size, cross->rank);
    allreduce_schedule(&schedule, (enum allreduce_path)run->allreduce_path, &run->wire, shard->nbytes,
                       bhvd_dtype_size(across->dtype));
    return flight_start(run, cross, &schedule, &(struct material){.reduction = *across, .list = shard}, NULL, NULL, flight);
}

bhvd_status allreduce_hierarchical(struct run *run, struct group *group, const struct reduction *reduction,
                                   const struct span_list *list)
{
    struct reduction within = *reduction, across = *reduction;
    within.postscale = across.prescale = 1.0;
    struct levels levels = {.run = run, .h = group->hierarchy, .within = &within, .between = start_shard, .arg = &across,
                            .shard_bytes = SHARD_BYTES, .depth = DEPTH};
    return run_levels(&levels, list);
}
