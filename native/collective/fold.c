#include "collective/fold.h"


static int extra_of(const struct fold *fold) { return fold->group->size - fold->size; }

static bool has_neighbour(const struct fold *fold) { return fold->group->rank < 2 * extra_of(fold); }

bhvd_status fold_begin(struct fold *fold, struct run *run, struct group *group,
                       const struct reduction *reduction, const struct span_list *list)
{
    *fold = (struct fold){.run = run, .group = group, .reduction = reduction, .nbytes = list->nbytes, .size = 1};
    while (2 * fold->size <= group->size)
        fold->size *= 2;
    fold->received = fusion_acquire(run, 1, list->nbytes);
    if (!vector_init(&fold->vector, run, list, bhvd_dtype_size(reduction->dtype)) || !fold->received)
        return run_fail(run, BHVD_ERR_SYSTEM, "no memory for a fusion buffer of %zu bytes", list->nbytes);
    vector_load(&fold->vector, reduction, 0, list->nbytes);
    fold->rank = group->rank - extra_of(fold);
    if (!has_neighbour(fold))
        return BHVD_OK;
    struct transfer transfer;
    bool gives = group->rank % 2 == 0;
    fold->rank = gives ? -1 : group->rank / 2;
    if (gives)
        link_post_send(group_link(run, group, group->rank + 1), &transfer, fold->vector.data, fold->nbytes);
    else
        link_post_recv(group_link(run, group, group->rank - 1), &transfer, fold->received, fold->nbytes);
    bhvd_status status = run_transfers(run, &transfer, 1);
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
            link_post_recv(group_link(fold->run, fold->group, fold->group->rank + 1), &transfer, fold->vector.data,
                           fold->nbytes);
        else
            link_post_send(group_link(fold->run, fold->group, fold->group->rank - 1), &transfer, fold->vector.data,
                           fold->nbytes);
        status = run_transfers(fold->run, &transfer, 1);
    }
    if (!status)
        vector_store(&fold->vector, 0, fold->nbytes);
    return status;
}

struct link *fold_link(const struct fold *fold, int rank)
{
    int extra = extra_of(fold);
    return group_link(fold->run, fold->group, rank < extra ? 2 * rank + 1 : rank + extra);
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
