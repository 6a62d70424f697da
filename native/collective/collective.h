// Collectives over a process set. Straight-line code: post messages, wait, reduce, as in the textbook; waiting runs the
// engine (core/progress.h). Words: docs/glossary.md. All are called by the engine, in the same order on all ranks.
//
//     ..._shared        all members on one host: blocks staged in shared memory (shared.h)
//     ..._hierarchical  in two levels: members on several hosts, some with several members (hierarchy.h)
//     ..._ring etc.     over links: any transport
//
// Every function returns the context's failure when a rank is lost meanwhile; results are undefined then.
#ifndef BHVD_COLLECTIVE_H
#define BHVD_COLLECTIVE_H

#include "core/context.h"
#include "core/fusion.h"

// Runs an execution: chooses the algorithm (select.c, the only place), fills results and values.
bhvd_status collective_execute(bhvd_context *ctx, const struct execution *execution, struct bhvd_error *error);

struct reduction {
    bhvd_dtype dtype;
    kernel_reduce_fn reduce;
    kernel_scale_fn scale;
    double prescale, postscale;         // 1.0: untouched
};

// How an allreduce is done: chosen in select.c, or forced by BAGUA_HVD_ALLREDUCE.
enum allreduce_path {
    ALLREDUCE_CHOSEN,
    ALLREDUCE_SHARED,           // shared memory: sets on one host
    ALLREDUCE_RING,
    ALLREDUCE_DOUBLING,
    ALLREDUCE_HALVING,
    ALLREDUCE_HIERARCHICAL      // sets on several hosts, some with several members
};

// "" or NULL: chosen. BHVD_ERR_ARGUMENT for an unknown name, with the known ones.
bhvd_status allreduce_path_parse(const char *name, enum allreduce_path *path, struct bhvd_error *error);

// In place on the vector that the spans make up: dst = postscale * reduce over ranks (prescale * src).
bhvd_status allreduce_shared(bhvd_context *ctx, struct process_set *set, const struct reduction *reduction,
                             const struct span_list *list);
bhvd_status allreduce_ring(bhvd_context *ctx, struct process_set *set, const struct reduction *reduction,
                           const struct span_list *list);
bhvd_status allreduce_doubling(bhvd_context *ctx, struct process_set *set, const struct reduction *reduction,
                               const struct span_list *list);
bhvd_status allreduce_halving(bhvd_context *ctx, struct process_set *set, const struct reduction *reduction,
                              const struct span_list *list);
// By the best of the above.
bhvd_status allreduce_links(bhvd_context *ctx, struct process_set *set, const struct reduction *reduction,
                            const struct span_list *list);
// In two levels, on a set that has a hierarchy (hierarchy.h): reduces within each host, lets `between` work in place on
// every shard of the vector among its owners, and spreads the result within each host. begin: the shard's place in the
// vector, in bytes.
typedef bhvd_status (*hierarchical_fn)(bhvd_context *ctx, struct process_set *cross, const struct span_list *shard,
                                       size_t begin, void *arg);
bhvd_status hierarchical_run(bhvd_context *ctx, struct process_set *set, const struct reduction *within,
                             const struct span_list *list, hierarchical_fn between, void *arg);
bhvd_status allreduce_hierarchical(bhvd_context *ctx, struct process_set *set, const struct reduction *reduction,
                                   const struct span_list *list);

// Every span is one tensor. The set's size is a power of two. Float dtypes.
bhvd_status allreduce_adasum(bhvd_context *ctx, struct process_set *set, const struct reduction *reduction,
                             const struct span_list *list);

// part[i]: bytes of the vector that rank i of the set gets, in rank order; dst: this rank's part. Over links it may be src,
// which is overwritten when it has been sent.
bhvd_status reducescatter_shared(bhvd_context *ctx, struct process_set *set, const struct reduction *reduction,
                                 const struct span_list *src, void *dst, const size_t *part);
bhvd_status reducescatter_pairwise(bhvd_context *ctx, struct process_set *set, const struct reduction *reduction,
                                   const void *src, void *dst, const size_t *part);
// The set has a hierarchy, and its hosts hold equally many members.
bhvd_status reducescatter_hierarchical(bhvd_context *ctx, struct process_set *set, const struct reduction *reduction,
                                       const void *src, void *dst, const size_t *part);

// part[i]: bytes that rank i contributes; dst holds all of them, in rank order. src may lie in dst at its place.
bhvd_status allgather_shared(bhvd_context *ctx, struct process_set *set, const void *src,
                             const struct span_list *dst, const size_t *part);
bhvd_status allgather_pairwise(bhvd_context *ctx, struct process_set *set, const void *src, void *dst,
                               const size_t *part);
// The set has a hierarchy.
bhvd_status allgather_hierarchical(bhvd_context *ctx, struct process_set *set, const void *src, void *dst,
                                   const size_t *part);
// The part of it between hosts, to be waited for: host by host, its own part goes out, and those of the members come in whose
// index is this one's modulo the number of members here. place: by position, where in dst. Returns how many it posted, less
// than two for each member.
int allgather_post_across(bhvd_context *ctx, struct process_set *set, const void *src, unsigned char *dst, const size_t *place,
                          const size_t *part, struct transfer *transfers);

// bytes[from * size + to]; src and dst: the parts one after the other.
bhvd_status alltoall_shared(bhvd_context *ctx, struct process_set *set, const void *src, void *dst,
                            const size_t *bytes);
bhvd_status alltoall_pairwise(bhvd_context *ctx, struct process_set *set, const void *src, void *dst,
                              const size_t *bytes);

enum { BROADCAST_SEGMENT_BYTES = 128 * 1024 };

// root: position in the set. The root's dst may equal src.
bhvd_status broadcast_shared(bhvd_context *ctx, struct process_set *set, int root, const void *src, void *dst,
                             size_t nbytes);
// local: NULL, or a set in shared memory to which this member shows every segment as it comes.
bhvd_status broadcast_tree(bhvd_context *ctx, struct process_set *set, int root, const void *src, void *dst,
                           size_t nbytes, struct process_set *local);
// The set has a hierarchy, and the root's local index exists on every host.
bhvd_status broadcast_hierarchical(bhvd_context *ctx, struct process_set *set, int root, const void *src, void *dst,
                                   size_t nbytes);

// memcpy for which NULL is fine when there is nothing to copy.
static inline void collective_copy(void *dst, const void *src, size_t nbytes)
{
    if (nbytes)
        memcpy(dst, src, nbytes);
}

// The link to a member, by its position in the set.
static inline struct link *collective_link(bhvd_context *ctx, const struct process_set *set, int index)
{
    return &ctx->connections.links[set->ranks[index]];
}

#endif
