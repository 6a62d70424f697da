// Brings n ranks down to a power of two, p, for algorithms that pair ranks by a bit of their number. Of the first
// 2 (n - p) ranks the even ones give their vectors to their odd neighbours and take the result from them in the end.
#ifndef BHVD_FOLD_H
#define BHVD_FOLD_H

#include "collective/collective.h"
#include "run/vector.h"

struct fold {
    struct run *run;
    struct group *group;
    const struct reduction *reduction;
    struct vector vector;
    unsigned char *received;    // scratch number 1, as large as the vector
    size_t nbytes;
    int size;                   // p
    int rank;                   // among the p, -1: stands aside
};

// Loads the whole vector and adds the neighbour's.
bhvd_status fold_begin(struct fold *fold, struct run *run, struct group *group,
                       const struct reduction *reduction, const struct span_list *list);
// Gives the neighbour the result, and stores it.
bhvd_status fold_end(struct fold *fold);

// The link to one of the p.
struct link *fold_link(const struct fold *fold, int rank);
// own = reduction of `own` and `received` in the order of the ranks they came from, so that two ranks which exchange
// their vectors compute the same bits.
void fold_reduce(const struct fold *fold, unsigned char *own, const unsigned char *received, size_t nbytes,
                 bool own_is_lower);
void fold_postscale(const struct fold *fold, unsigned char *own, size_t nbytes);

#endif
