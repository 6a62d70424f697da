#include "collective/fold.h"

#include "core/progress.h"

static int extra_of(const struct fold *fold) { return fold->set->size - fold->size; }

static bool has_neighbour(const struct fold *fold) { return fold->set->rank < 2 * extra_of(fold); }

bhvd_status fold_begin(struct fold *fold, bhvd_context *ctx, struct process_set *set,
                       const struct reduction *reduction, const struct span_list *list)
{
    *fold = (struct fold){.ctx = ctx, .set = set, .reduction = reduction, .nbytes = list->nbytes, .size = 1};
    while (2 * fold->size <= set->size)
        fold->size *= 2;
    fold->received = fusion_acquire(ctx, 1, list->nbytes);
    if (!vector_init(&fold->vector, ctx, list, bhvd_dtype_size(reduction->dtype)) || !fold->received)
        return context_fail(ctx, BHVD_ERR_SYSTEM, "no memory for a fusion buffer of %zu bytes", list->nbytes);
    vector_load(&fold->vector, reduction, 0, list->nbytes);
    fold->rank = set->rank - extra_of(fold);
    if (!has_neighbour(fold))
        return BHVD_OK;
    struct transfer transfer;
    bool gives = set->rank % 2 == 0;
    fold->rank = gives ? -1 : set->rank / 2;
    if (gives)
        link_post_send(collective_link(ctx, set, set->rank + 1), &transfer, fold->vector.data, fold->nbytes);
    else
        link_post_recv(collective_link(ctx, set, set->rank - 1), &transfer, fold->received, fold->nbytes);
    bhvd_status status = progress_transfers(ctx, &transfer, 1);
    if (!status && !gives)
        fold_reduce(fold, fold->vector.data, fold->received, fold->nbytes, false);
    return status;
}

bhvd_status fold_end(struct fold *fold)
{
    bhvd_status status = BHVD_OK;
    if (has_neighbour(fold)) {
        struct transfer transfer;
        if (fold->rank < 0)
            link_post_recv(collective_link(fold->ctx, fold->set, fold->set->rank + 1), &transfer, fold->vector.data,
                           fold->nbytes);
        else
            link_post_send(collective_link(fold->ctx, fold->set, fold->set->rank - 1), &transfer, fold->vector.data,
                           fold->nbytes);
        status = progress_transfers(fold->ctx, &transfer, 1);
    }
    if (!status)
        vector_store(&fold->vector, 0, fold->nbytes);
    return status;
}

struct link *fold_link(const struct fold *fold, int rank)
{
    int extra = extra_of(fold);
    return collective_link(fold->ctx, fold->set, rank < extra ? 2 * rank + 1 : rank + extra);
}

void fold_reduce(const struct fold *fold, unsigned char *own, const unsigned char *received, size_t nbytes,
                 bool own_is_lower)
{
    fold->reduction->reduce(own, own_is_lower ? own : received, own_is_lower ? received : own,
                            nbytes / fold->vector.element);
}

void fold_postscale(const struct fold *fold, unsigned char *own, size_t nbytes)
{
    if (fold->reduction->postscale != 1.0)
        fold->reduction->scale(own, own, fold->reduction->postscale, nbytes / fold->vector.element);
}
