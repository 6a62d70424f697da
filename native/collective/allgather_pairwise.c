// Allgather over links: every member sends its part to each other. Wire: each part n-1 times, one hop.
#include <stdlib.h>

#include "collective/collective.h"

bhvd_status allgather_pairwise(struct run *run, struct group *group, const void *src, void *dst,
                               const size_t *part)
{
    struct transfer *transfers = calloc(2 * (size_t)group->size, sizeof *transfers);
    if (!transfers)
        return run_fail(run, BHVD_ERR_SYSTEM, "no memory for %d messages", 2 * group->size);
    unsigned char *place = dst;
    int posted = 0;
    for (int i = 0; i < group->size; place += part[i++]) {
        if (i == group->rank) {
            span_copy(place, src, part[i]);
            continue;
        }
        struct link *link = group_link(run, group, i);
        link_post_send(link, &transfers[posted++], src, part[group->rank]);
        link_post_recv(link, &transfers[posted++], place, part[i]);
    }
    bhvd_status status = run_transfers(run, transfers, posted);
    free(transfers);
    return status;
}
