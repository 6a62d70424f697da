// Alltoall over links: one message to and from each other member with which there is something to exchange.
#include <stdlib.h>

#include "collective/collective.h"
#include "core/progress.h"

bhvd_status alltoall_pairwise(bhvd_context *ctx, struct process_set *set, const void *src, void *dst,
                              const size_t *bytes)
{
    const int n = set->size, me = set->rank;
    struct transfer *transfers = calloc(2 * (size_t)n, sizeof *transfers);
    if (!transfers)
        return context_fail(ctx, BHVD_ERR_SYSTEM, "no memory for %d messages", 2 * n);
    const unsigned char *from = src, *own = NULL;
    unsigned char *to = dst, *own_place = NULL;
    int posted = 0;
    for (int i = 0; i < n; i++) {
        size_t out = bytes[me * n + i], in = bytes[i * n + me];
        if (i == me) {
            own = from;
            own_place = to;
        } else {
            struct link *link = collective_link(ctx, set, i);
            if (out)
                link_post_send(link, &transfers[posted++], from, out);
            if (in)
                link_post_recv(link, &transfers[posted++], to, in);
        }
        from += out;
        to += in;
    }
    collective_copy(own_place, own, bytes[me * n + me]);
    bhvd_status status = progress_transfers(ctx, transfers, posted);
    free(transfers);
    return status;
}
