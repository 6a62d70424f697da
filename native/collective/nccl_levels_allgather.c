// Allgather in two levels, between hosts that hold equally many members: own part to the host | allgather among counterparts |
// back | each member spreads what it has.
#include <stdlib.h>

#include "collective/nccl_levels.h"

// What the members with this rank's index have, to their places on this rank's device.
static bhvd_status gather_across(struct nccl_run *x, const void *src, unsigned char *dst, const size_t *part,
                                 const size_t *place, size_t *cross_part)
{
    const struct hierarchy *h = x->levels;
    struct device_buffer *own, *all;
    size_t nbytes = 0;
    for (int host = 0; host < h->hosts; host++)
        nbytes += cross_part[host] = part[hierarchy_member(h, host, h->index)];
    bhvd_status status = nccl_run_scratch(x, MEMORY_PINNED, cross_part[h->host], &own);
    if (!status)
        status = nccl_run_scratch(x, MEMORY_PINNED, nbytes, &all);
    if (!status)
        status = nccl_levels_to_host(x, own, src, cross_part[h->host]);
    if (!status)
        status = nccl_levels_wait_for(x, own);
    if (!status)
        status = allgather_pairwise(x->ctx, h->cross, own->data, all->data, cross_part);
    const unsigned char *at = all->data;
    for (int host = 0; host < h->hosts && !status; at += cross_part[host++])
        status = nccl_run_copy(x, dst + place[hierarchy_member(h, host, h->index)], at, cross_part[host]);
    return status;
}

bhvd_status nccl_levels_allgather(struct nccl_run *x, const void *src, unsigned char *dst, const size_t *part)
{
    const struct hierarchy *h = x->levels;
    const int members = h->hosts * h->shards;
    size_t *place = malloc((size_t)(members + h->hosts) * sizeof *place), total = 0;
    if (!place)
        return context_fail(x->ctx, BHVD_ERR_SYSTEM, "no memory for a collective of %d ranks", members);
    for (int i = 0; i < members; total += part[i++])
        place[i] = total;
    bhvd_status status = gather_across(x, src, dst, part, place, place + members);
    if (!status) {
        nccl_result inside = x->nccl->group_start();
        for (int i = 0; i < members; i++) {
            int host, index;
            hierarchy_find(h, i, &host, &index);
            if (part[i])
                nccl_run_keep(&inside, x->nccl->broadcast(dst + place[i], dst + place[i], part[i], NCCL_UINT8, index,
                                                          x->group->comm, x->stream));
        }
        status = nccl_run_group_end(x, inside);
    }
    free(place);
    return status;
}
