// Collectives in shared memory as passages (run/shared.h), for what goes on beside others. What they are given lives until they
// are over.
#ifndef BHVD_PASSAGES_H
#define BHVD_PASSAGES_H

#include "run/shared.h"

struct allreduce_passage {
    struct passage passage;
    struct run *run;
    const struct reduction *reduction;
    struct span_cursor in, own, out;
    size_t nbytes;
    kernel_copy_fn copy;
};

void allreduce_begin(struct allreduce_passage *a, struct run *run, struct group *group, int lane, const struct reduction *reduction,
                     const struct span_list *list);

struct reducescatter_passage {
    struct passage passage;
    struct run *run;
    const struct reduction *reduction;
    const struct span_list *src;
    unsigned char *dst;
    const size_t *part;
    size_t piece;               // bytes of every member's part in a block
};

void reducescatter_begin(struct reducescatter_passage *r, struct run *run, struct group *group, int lane,
                         const struct reduction *reduction, const struct span_list *src, void *dst, const size_t *part);

struct allgather_passage {
    struct passage passage;
    struct run *run;
    const unsigned char *src;
    const struct span_list *dst;
    const size_t *part;
    kernel_copy_fn copy;
};

// Puts the own part where it belongs.
void allgather_begin(struct allgather_passage *g, struct run *run, struct group *group, int lane, const void *src,
                     const struct span_list *dst, const size_t *part);

struct broadcast_passage {
    struct passage passage;
    struct run *run;
    const unsigned char *src;
    unsigned char *dst;
    size_t nbytes;
    kernel_copy_fn copy;
};

// From the root's src to the others' dst.
void broadcast_begin(struct broadcast_passage *b, struct run *run, struct group *group, int lane, int root, const void *src,
                     void *dst, size_t nbytes);

#endif
