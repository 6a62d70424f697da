// Reducescatter over links: every member sends each other its part, and adds what it receives in rank order.
// Wire: N (n-1)/n elements each way, one hop.
#include <stdlib.h>

#include "collective/collective.h"

bhvd_status reducescatter_pairwise(struct run *run, struct group *group, const struct reduction *reduction,
                                   const void *src, void *dst, const size_t *part)
{
    const int n = group->size, me = group->rank;
    const size_t mine = part[me], count = mine / bhvd_dtype_size(reduction->dtype);
    size_t total = 0, my_offset = 0;
    for (int i = 0; i < n; i++) {
        my_offset += i < me ? part[i] : 0;
        total += part[i];
    }
    const unsigned char *vector = src;
    if (reduction->prescale != 1.0) {
        unsigned char *scaled = fusion_acquire(run, 0, total);
        if (!scaled)
            return run_fail(run, BHVD_ERR_SYSTEM, "no memory for a fusion buffer of %zu bytes", total);
        reduction->scale(scaled, src, reduction->prescale, total / bhvd_dtype_size(reduction->dtype));
        vector = scaled;
    }
    struct transfer *transfers = calloc(2 * (size_t)n, sizeof *transfers);
    unsigned char *received = fusion_acquire(run, 1, mine * (size_t)n);
    if (!transfers || !received) {
        free(transfers);
        return run_fail(run, BHVD_ERR_SYSTEM, "no memory to receive %zu bytes", mine * (size_t)n);
    }
    int posted = 0;
    size_t offset = 0;
    for (int i = 0; i < n; offset += part[i++]) {
        if (i == me)
            continue;
        struct link *link = group_link(run, group, i);
        link_post_send(link, &transfers[posted++], vector + offset, part[i]);
        link_post_recv(link, &transfers[posted++], received + (size_t)i * mine, mine);
    }
    bhvd_status status = run_transfers(run, transfers, posted);
    span_copy(received + (size_t)me * mine, vector + my_offset, mine);
    const unsigned char *sum = received;
    for (int i = 1; i < n && !status; i++) {
        reduction->reduce(dst, sum, received + (size_t)i * mine, count);
        sum = dst;
    }
    if (n == 1)
        span_copy(dst, received, mine);
    if (!status && reduction->postscale != 1.0)
        reduction->scale(dst, dst, reduction->postscale, count);
    free(transfers);
    return status;
}
