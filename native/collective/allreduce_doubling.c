// Allreduce by recursive doubling over links, for vectors so short that the number of hops is what counts: in round d
// rank r exchanges its whole vector with rank r ^ 2^d, and both add them in the same order. So all ranks end bit-equal.
// Wire: log2 p N elements each way per rank, log2 p hops; two more hops for the ranks that do not make a power of two.
#include "collective/fold.h"

bhvd_status allreduce_doubling(struct run *run, struct group *group, const struct reduction *reduction,
                               const struct span_list *list)
{
    struct fold fold;
    bhvd_status status = fold_begin(&fold, run, group, reduction, list);
    if (status)
        return status;
    for (int distance = 1; distance < fold.size && fold.rank >= 0 && !status; distance *= 2) {
        struct transfer transfers[2];
        struct link *link = fold_link(&fold, fold.rank ^ distance);
        link_post_send(link, &transfers[0], fold.vector.data, fold.nbytes);
        link_post_recv(link, &transfers[1], fold.received, fold.nbytes);
        status = run_transfers(run, transfers, 2);
        if (!status)
            fold_reduce(&fold, fold.vector.data, fold.received, fold.nbytes, !(fold.rank & distance));
    }
    if (fold.rank >= 0 && !status)
        fold_postscale(&fold, fold.vector.data, fold.nbytes);
    return status ? status : fold_end(&fold);
}
