// Allreduce by recursive halving and doubling over links (Rabenseifner, 2004), for vectors between those where hops count
// and those where nothing but bytes does. The vector is cut into p chunks; rank r ends its share as the owner of chunk r.
//
//     distance d = p/2 ... 1:   ranks r and r ^ d hold the same chunks; each keeps its half of them, sends the other half
//                               and adds what it receives
//     distance d = 1 ... p/2:   ranks r and r ^ d send each other what they have finished
//
// Wire: 2 N (p-1)/p elements each way per rank, 2 log2 p hops; with ranks that do not make a power of two, 2 N and two
// hops more. Both sides of an exchange add in the same order, and every chunk is finished once, so all end bit-equal.
#include "collective/fold.h"

struct range {
    size_t begin, end;          // bytes
};

// Chunks first to last - 1.
static struct range chunks(const struct fold *fold, int first, int last)
{
    return (struct range){vector_chunk(fold->nbytes, fold->vector.element, first, fold->size),
                          vector_chunk(fold->nbytes, fold->vector.element, last, fold->size)};
}

// The chunks that `rank` keeps at this distance.
static struct range kept(const struct fold *fold, int rank, int distance)
{
    int first = rank / distance * distance;
    return chunks(fold, first, first + distance);
}

static bhvd_status exchange(const struct fold *fold, int peer, struct range give, struct range take, unsigned char *to)
{
    struct transfer transfers[2];
    struct link *link = fold_link(fold, peer);
    link_post_send(link, &transfers[0], fold->vector.data + give.begin, give.end - give.begin);
    link_post_recv(link, &transfers[1], to, take.end - take.begin);
    return run_transfers(fold->run, transfers, 2);
}

bhvd_status allreduce_halving(struct run *run, struct group *group, const struct reduction *reduction,
                              const struct span_list *list)
{
    struct fold fold;
    bhvd_status status = fold_begin(&fold, run, group, reduction, list);
    if (status)
        return status;
    for (int distance = fold.size / 2; distance >= 1 && fold.rank >= 0 && !status; distance /= 2) {
        const int peer = fold.rank ^ distance;
        struct range mine = kept(&fold, fold.rank, distance);
        status = exchange(&fold, peer, kept(&fold, peer, distance), mine, fold.received);
        if (!status)
            fold_reduce(&fold, fold.vector.data + mine.begin, fold.received, mine.end - mine.begin, fold.rank < peer);
    }
    if (fold.rank >= 0 && !status) {
        struct range mine = kept(&fold, fold.rank, 1);
        fold_postscale(&fold, fold.vector.data + mine.begin, mine.end - mine.begin);
    }
    for (int distance = 1; distance < fold.size && fold.rank >= 0 && !status; distance *= 2) {
        const int peer = fold.rank ^ distance;
        struct range take = kept(&fold, peer, distance);
        status = exchange(&fold, peer, kept(&fold, fold.rank, distance), take, fold.vector.data + take.begin);
    }
    return status ? status : fold_end(&fold);
}
