// Reducescatter in two levels (hierarchy.h), for hosts that hold equally many members: within each host, member i gets
// the host's sums of the parts that the i-th members of all hosts are to have; across hosts these exchange and add them.
// Wire: N (h-1)/h elements each way per host of h, instead of N for each of its members.
#include <stdlib.h>

#include "collective/collective.h"
#include "run/hierarchy.h"

bhvd_status reducescatter_hierarchical(struct run *run, struct group *group, const struct reduction *reduction,
                                       const void *src, void *dst, const size_t *part)
{
    const struct hierarchy *h = group->hierarchy;
    const int members = h->local->size;
    struct reduction within = *reduction, across = *reduction;
    within.postscale = across.prescale = 1.0;
    size_t *sizes = calloc((size_t)(members + h->hosts), sizeof *sizes);
    size_t *place = malloc((size_t)group->size * sizeof *place);
    struct span *spans = malloc((size_t)group->size * sizeof *spans);
    struct span_list list = {spans, 0, (size_t)group->size, 0};
    bhvd_status status = BHVD_OK;
    if (!sizes || !place || !spans) {
        status = run_fail(run, BHVD_ERR_SYSTEM, "no memory for a collective of %d ranks", group->size);
        goto out;
    }
    size_t *local_part = sizes, *cross_part = sizes + members, total = 0;
    for (int i = 0; i < group->size; total += part[i++])
        place[i] = total;
    // The vector in the order of the local members that the parts go through.
    for (int index = 0; index < members; index++) {
        for (int host = 0; host < h->hosts; host++) {
            int owner = hierarchy_member(h, host, index);
            spans[list.count++] = (struct span){(const unsigned char *)src + place[owner], NULL, part[owner]};
            list.nbytes += part[owner];
            local_part[index] += part[owner];
        }
    }
    for (int host = 0; host < h->hosts; host++)
        cross_part[host] = part[hierarchy_member(h, host, h->index)];
    unsigned char *sums = fusion_acquire(run, 0, local_part[h->index]);
    if (!sums)
        status = run_fail(run, BHVD_ERR_SYSTEM, "no memory for a fusion buffer of %zu bytes", local_part[h->index]);
    else
        status = reducescatter_shared(run, h->local, &within, &list, sums, local_part);
    if (!status)
        status = reducescatter_links(run, h->cross, &across, sums, dst, cross_part);
out:
    free(sizes);
    free(place);
    free(spans);
    return status;
}
