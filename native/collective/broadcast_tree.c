// Broadcast over links by a binomial tree: with ranks counted from the root, rank v has its parent at v without its
// lowest set bit, and its children at v + 2^k for every 2^k below that bit. ceil(log2 n) hops. Segments are passed on
// as they come, so that all levels are busy at once.
#include <stdlib.h>

#include "collective/collective.h"

enum { SEGMENT_BYTES = BROADCAST_SEGMENT_BYTES, CHILDREN_MAX = 31 };

static int find_children(int virtual_rank, int size, int *children)
{
    int count = 0;
    for (int bit = 1; bit < size && !(virtual_rank & bit); bit <<= 1) {
        if (virtual_rank + bit < size)
            children[count++] = virtual_rank + bit;
    }
    return count;
}

bhvd_status broadcast_tree(struct run *run, struct group *group, int root, const void *src, void *dst,
                           size_t nbytes, struct group *local)
{
    const int n = group->size, me = (group->rank - root + n) % n;
    int children[CHILDREN_MAX];
    const int child_count = find_children(me, n, children);
    const size_t segments = (nbytes + SEGMENT_BYTES - 1) / SEGMENT_BYTES;
    if (me == 0 && dst != src)
        span_copy(dst, src, nbytes);
    // Receives first, then the sends to the children of each segment.
    struct transfer *transfers = calloc(segments * (1 + (size_t)child_count) + 1, sizeof *transfers);
    if (!transfers)
        return run_fail(run, BHVD_ERR_SYSTEM, "no memory for %zu messages", segments);
    struct transfer *receives = transfers, *sends = transfers + segments;
    struct link *parent = me ? group_link(run, group, ((me & (me - 1)) + root) % n) : NULL;
    bhvd_status status = BHVD_OK;
    for (size_t s = 0; s < segments && parent; s++) {
        size_t offset = s * SEGMENT_BYTES, left = nbytes - offset;
        link_post_recv(parent, &receives[s], (char *)dst + offset, left < SEGMENT_BYTES ? left : SEGMENT_BYTES);
    }
    int posted = 0;
    for (size_t s = 0; s < segments && !status; s++) {
        size_t offset = s * SEGMENT_BYTES, left = nbytes - offset;
        if (parent)
            status = run_transfers(run, &receives[s], 1);
        for (int c = child_count - 1; c >= 0 && !status; c--)      // the largest subtree first
            link_post_send(group_link(run, group, (children[c] + root) % n), &sends[posted++], (char *)dst + offset,
                           left < SEGMENT_BYTES ? left : SEGMENT_BYTES);
        if (local && !status)
            status = broadcast_shared(run, local, local->rank, (char *)dst + offset, (char *)dst + offset,
                                      left < SEGMENT_BYTES ? left : SEGMENT_BYTES);
    }
    if (!status)
        status = run_transfers(run, sends, posted);
    free(transfers);
    return status;
}
