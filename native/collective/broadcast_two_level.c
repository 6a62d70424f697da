// Two-level broadcast (executor/two_level.h): over links to the members with the root's local index, one on each host. Each of them
// forwards every piece, and copies it in for its host. A host receives the vector once, however many members it holds.
#include "collective/collectives.h"
#include "collective/pipelines.h"
#include "collective/schedules.h"
#include "executor/hierarchy.h"
#include "executor/two_level.h"

enum { PIECES = 64 };                   // at most: each is a separate schedule

struct broadcast {
    struct two_level two_level;
    const struct hierarchy *h;
    int host, index;                    // the root's
    const unsigned char *src;
    unsigned char *dst;
    size_t piece;                       // bytes, whole segments
    struct broadcast_pipeline distributing;
};

static struct byte_range piece_of(const struct broadcast *b, size_t number)
{
    return (struct byte_range){number * b->piece, shared_piece(b->two_level.nbytes, number * b->piece, b->piece)};
}

static bhvd_status inter_exchange(struct executor *exec, struct two_level *l, size_t number, struct plan *plan)
{
    const struct broadcast *b = (struct broadcast *)l;
    const struct byte_range piece = piece_of(b, number);
    (void)exec;
    if (b->h->index != b->index)
        return BHVD_OK;
    const void *src = b->h->host == b->host ? b->src + piece.begin : NULL;
    const bool chain = broadcast_by_chain(b->h->cross->size, &l->network, l->nbytes);
    broadcast_plan(plan, b->h->cross, b->host, src, b->dst + piece.begin, piece.nbytes, chain);
    return BHVD_OK;
}

static struct pipeline *distribute(struct executor *exec, struct two_level *l, size_t number)
{
    struct broadcast *b = (struct broadcast *)l;
    const struct byte_range piece = piece_of(b, number);
    broadcast_begin(&b->distributing, exec, l->local, l->slot, b->index, b->dst + piece.begin, b->dst + piece.begin, piece.nbytes);
    return &b->distributing.pipeline;
}

static const struct two_level_ops OPS = {.inter_exchange = inter_exchange, .distribute = distribute};

bhvd_status broadcast_two_level(struct plan *plan, struct executor *exec, struct group *group, int root, const void *src,
                                   void *dst, size_t nbytes)
{
    const struct hierarchy *h = group->hierarchy;
    const size_t piece = two_level_piece(nbytes, PIECES), count = (nbytes + piece - 1) / piece;
    struct broadcast *b = two_level_create(exec, sizeof *b, &OPS, h->local, nbytes, count, count);
    if (!b)
        return exec->failure.status;
    b->h = h;
    hierarchy_find(h, root, &b->host, &b->index);
    b->src = src;
    b->dst = dst;
    b->piece = piece;
    return two_level_plan(exec, &b->two_level, true, plan);
}
