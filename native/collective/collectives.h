// Collectives over a group of ranks. Each blocks until it is done, or makes a plan that the engine runs beside others. Terms:
// docs/glossary.md. The engine calls them in the same order on all ranks.
//
//     ..._shared        all members on one host: blocks in shared memory (executor/shared.h)
//     ..._hierarchical  in shared memory within hosts, over links between them (executor/group.h)
//     schedule_...      over links: any transport; as schedules, several of which can run at once
//     ..._begin         in shared memory as pipelines (executor/shared.h), which can run beside others
//
// Every function returns the executor's failure if a rank is lost in the meantime; results are undefined then.
#pragma once

#include "executor/task.h"

// "" or NULL: the engine chooses. BHVD_ERR_ARGUMENT for an unknown name; the message lists the known ones.
bhvd_status allreduce_path_parse(const char *name, enum allreduce_path *path, struct bhvd_error *error);

// In place on the vector that the spans make up: dst = postscale * reduce over ranks (prescale * src).
bhvd_status allreduce_shared(struct executor *exec, struct group *group, const struct reduction *reduction,
                             const struct span_list *list);
// Plans the cheapest of the three over links, or the one in exec->allreduce_path. The list must live as long as the plan's task.
void allreduce_plan(struct plan *plan, const struct executor *exec, const struct group *group, const struct reduction *reduction,
                    const struct span_list *list);
// ALLREDUCE_CHOSEN: the cheapest of the three.
void allreduce_schedule(struct schedule *schedule, enum allreduce_path path, const struct network_cost *network, size_t nbytes,
                        size_t element);
// Plans a hierarchical allreduce, in a group that has a hierarchy (executor/group.h). Takes ownership of the list.
bhvd_status allreduce_hierarchical(struct plan *plan, struct executor *exec, const struct group *group,
                                   const struct reduction *reduction, struct span_list *list);

// Every span is one tensor. The group's size is a power of two. Float dtypes.
bhvd_status allreduce_adasum(struct executor *exec, struct group *group, const struct reduction *reduction,
                             const struct span_list *list);

// Stores the sizes of n members' parts, then their offsets: 2 n numbers. Returns the offsets.
static inline size_t *parts_keep(size_t *kept, const size_t *part, size_t n)
{
    size_t *offset = kept + n, at = 0;
    for (size_t i = 0; i < n; at += part[i++]) {
        kept[i] = part[i];
        offset[i] = at;
    }
    return offset;
}

// part[i]: bytes of the vector for rank i, in rank order; dst: this rank's part.
bhvd_status reducescatter_shared(struct executor *exec, struct group *group, const struct reduction *reduction,
                                 const struct span_list *src, void *dst, const size_t *part);
// The group must have a hierarchy with equally many members per host. The first part must be the longest. dst may begin where
// src does.
bhvd_status reducescatter_hierarchical(struct plan *plan, struct executor *exec, const struct group *group,
                                       const struct reduction *reduction, const void *src, void *dst, const size_t *part);

// part[i]: bytes from rank i; dst holds all parts in rank order. src may be this rank's part in dst.
bhvd_status allgather_shared(struct executor *exec, struct group *group, const void *src,
                             const struct span_list *dst, const size_t *part);
// The group must have a hierarchy.
bhvd_status allgather_hierarchical(struct plan *plan, struct executor *exec, const struct group *group, const void *src, void *dst,
                                   const size_t *part);

// src and dst hold the parts one after the other.
bhvd_status alltoall_shared(struct executor *exec, struct group *group, const void *src, void *dst,
                            const struct parts *parts);

// root: position in the group. The root's dst may equal src.
bhvd_status broadcast_shared(struct executor *exec, struct group *group, int root, const void *src, void *dst,
                             size_t nbytes);
void broadcast_plan(struct plan *plan, const struct group *group, int root, const void *src, void *dst, size_t nbytes, bool chain);
// The group must have a hierarchy, and the root's local index must exist on every host.
bhvd_status broadcast_hierarchical(struct plan *plan, struct executor *exec, const struct group *group, int root, const void *src,
                                   void *dst, size_t nbytes);

// ---------------------------------------------------------------------------------------------------------- over links

// These functions write the part of the rank that `schedule` was made for (executor/schedule.h). They depend only on their
// arguments, so any rank's schedule can be computed anywhere.

enum { ALPHA_MIN_NS = 27000 };  // per message: the ranks' own overhead, a lower bound however close the hosts are

static inline double network_alpha_ns(const struct network_cost *network)
{
    return network->alpha_ns > ALPHA_MIN_NS ? network->alpha_ns : ALPHA_MIN_NS;
}

// From the tensors, loaded into the vector, to the tensors: postscale * sum over ranks. element: its size in bytes.
void schedule_allreduce_ring(struct schedule *schedule, size_t nbytes, size_t element);
void schedule_allreduce_doubling(struct schedule *schedule, size_t nbytes);
void schedule_allreduce_halving(struct schedule *schedule, size_t nbytes, size_t element);

// Where chunk `index` of `size` begins, in bytes: the first count % size chunks are one element longer.
static inline size_t vector_chunk(size_t nbytes, size_t element, int index, int size)
{
    size_t count = nbytes / element, at = (size_t)index, longer = count % (size_t)size;
    return (count / (size_t)size * at + (at < longer ? at : longer)) * element;
}

// From input (part[rank] bytes) to output (all parts in rank order).
void schedule_allgather_direct(struct schedule *schedule, const size_t *part);
void schedule_allgather_bruck(struct schedule *schedule, const size_t *part);
// Picks the cheaper of the two. network and part must be equal on all ranks.
void allgather_schedule(struct schedule *schedule, const struct network_cost *network, const size_t *part);
// Parts are in rank order: in input by receiver, in output by sender.
void schedule_alltoall(struct schedule *schedule, const size_t *sent, const size_t *received);
// From the vector, all parts in rank order, to output: part[rank] bytes of the sum. loads: the tensors' values are loaded into the
// vector first; otherwise they are read from input. Output may begin where input does.
void schedule_reducescatter(struct schedule *schedule, const size_t *part, bool loads);
// Rounds until all n ranks have a value, if the number that have it doubles in each round.
static inline int doubling_rounds(int n)
{
    int rounds = 0;
    while (1 << rounds < n)
        rounds++;
    return rounds;
}

// From the root's input to every output, along a chain or a tree.
void schedule_broadcast(struct schedule *schedule, int root, size_t nbytes, bool chain);
// Whether a chain is cheaper. network must be equal on all ranks.
bool broadcast_by_chain(int n, const struct network_cost *network, size_t nbytes);

// ----------------------------------------------------------------------------- pipelines: their arguments outlive them

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

// Allgather, alltoall and broadcast.
struct exchange_pipeline {
    struct pipeline pipeline;
    const unsigned char *src;
    const struct span_list *dst;
    const size_t *sent, *received;      // sent NULL: the same to all; received NULL: a broadcast
    size_t piece;                       // bytes of each part in a block
    kernel_copy_fn copy;
    struct span whole;                  // dst, if it is one span
    struct span_list list;
};

// Also copies this member's own part to its destination.
void allgather_begin(struct exchange_pipeline *x, struct executor *exec, struct group *group, int slot, const void *src,
                     const struct span_list *dst, const size_t *part);
// Copies from the root's src to the others' dst.
void broadcast_begin(struct exchange_pipeline *x, struct executor *exec, struct group *group, int slot, int root, const void *src,
                     void *dst, size_t nbytes);
