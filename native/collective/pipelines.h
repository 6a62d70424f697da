// Collectives in shared memory as pipelines (executor/shared.h), which can run beside others. Their arguments must live until
// they are over.
#pragma once

#include "executor/shared.h"

// A member reads its own values in place. If they have to be scaled first, it copies them in.
static inline bool own_is_copied(const struct reduction *reduction) { return reduction->prescale != 1.0; }

struct allreduce_pipeline {
    struct pipeline pipeline;
    const struct reduction *reduction;
    struct span_cursor in, own, out;
    size_t nbytes;
    kernel_copy_fn copy;
};

void allreduce_begin(struct allreduce_pipeline *a, struct executor *exec, struct group *group, int slot,
                     const struct reduction *reduction, const struct span_list *list);

struct reducescatter_pipeline {
    struct pipeline pipeline;
    const struct reduction *reduction;
    const struct span_list *src;
    unsigned char *dst;
    const size_t *part;
    size_t piece;               // bytes of every member's part in a block
    size_t own;                 // offset of the own part in src
};

void reducescatter_begin(struct reducescatter_pipeline *r, struct group *group, int slot, const struct reduction *reduction,
                         const struct span_list *src, void *dst, const size_t *part);

struct allgather_pipeline {
    struct pipeline pipeline;
    const unsigned char *src;
    const struct span_list *dst;
    const size_t *part;
    kernel_copy_fn copy;
};

// Also copies this member's own part to its destination.
void allgather_begin(struct allgather_pipeline *g, struct executor *exec, struct group *group, int slot, const void *src,
                     const struct span_list *dst, const size_t *part);

struct broadcast_pipeline {
    struct pipeline pipeline;
    const unsigned char *src;
    unsigned char *dst;
    size_t nbytes;
    kernel_copy_fn copy;
};

// Copies from the root's src to the others' dst.
void broadcast_begin(struct broadcast_pipeline *b, struct executor *exec, struct group *group, int slot, int root, const void *src,
                     void *dst, size_t nbytes);
