// Alltoall over links: one message to and from each other member with which there is something to exchange.
#include <stdlib.h>

#include "collective/collective.h"

bhvd_status alltoall_pairwise(struct run *run, struct group *group, const void *src, void *dst,
                              const struct parts *parts)
{
    const int n = group->size, me = group->rank;
    struct transfer *transfers = calloc(2 * (size_t)n, sizeof *transfers);
    if (!transfers)
        return run_fail(run, BHVD_ERR_SYSTEM, "no memory for %d messages", 2 * n);
    const unsigned char *from = src, *own = NULL;
    unsigned char *to = dst, *own_place = NULL;
    int posted = 0;
    for (int i = 0; i < n; i++) {
        const size_t out = parts->sent[i], in = parts->received[i];
        if (i == me) {
            own = from;
            own_place = to;
        } else {
            struct link *link = group_link(run, group, i);
            if (out)
                link_post_send(link, &transfers[posted++], from, out);
            if (in)
                link_post_recv(link, &transfers[posted++], to, in);
        }
        from += out;
        to += in;
    }
    span_copy(own_place, own, parts->sent[me]);
    bhvd_status status = run_transfers(run, transfers, posted);
    free(transfers);
    return status;
}
