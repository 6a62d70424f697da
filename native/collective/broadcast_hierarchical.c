// Broadcast in two levels (hierarchy.h): a tree over the members with the root's local index, one on each host, each of
// which shows every segment to its host as it comes. A host receives the vector once, however many members it holds.
#include "collective/collective.h"
#include "run/hierarchy.h"
#include "run/shared.h"

bhvd_status broadcast_hierarchical(struct run *run, struct group *group, int root, const void *src, void *dst,
                                   size_t nbytes)
{
    const struct hierarchy *h = group->hierarchy;
    int host, index;
    hierarchy_find(h, root, &host, &index);
    if (h->index == index)
        return broadcast_links(run, h->cross, host, src, dst, nbytes, h->local);
    bhvd_status status = BHVD_OK;
    for (size_t offset = 0; offset < nbytes && !status; offset += SCHEDULE_SEGMENT) {
        size_t left = nbytes - offset;
        status = broadcast_shared(run, h->local, index, NULL, (char *)dst + offset,
                                  left < SCHEDULE_SEGMENT ? left : SCHEDULE_SEGMENT);
    }
    return status;
}
