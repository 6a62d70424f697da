// Allgather over links: every member sends its part to each other. Wire: each part n-1 times, one hop.
#include <stdlib.h>

#include "collective/collective.h"
#include "core/progress.h"

bhvd_status allgather_pairwise(bhvd_context *ctx, struct process_set *set, const void *src, void *dst,
                               const size_t *part)
{
    struct transfer *transfers = calloc(2 * (size_t)set->size, sizeof *transfers);
    if (!transfers)
        return context_fail(ctx, BHVD_ERR_SYSTEM, "no memory for %d messages", 2 * set->size);
    unsigned char *place = dst;
    int posted = 0;
    for (int i = 0; i < set->size; place += part[i++]) {
        if (i == set->rank) {
            collective_copy(place, src, part[i]);
            continue;
        }
        struct link *link = collective_link(ctx, set, i);
        link_post_send(link, &transfers[posted++], src, part[set->rank]);
        link_post_recv(link, &transfers[posted++], place, part[i]);
    }
    bhvd_status status = progress_transfers(ctx, transfers, posted);
    free(transfers);
    return status;
}
