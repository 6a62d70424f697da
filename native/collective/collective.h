// Collectives over a group of ranks, each to its end, or as a plan that the engine lets go on beside others. Words: docs/glossary.md. All
// are called by the engine, in the same order on all ranks.
//
//     ..._shared        all members on one host: blocks staged in shared memory (run/shared.h)
//     ..._hierarchical  in two levels: members on several hosts, some with several members (run/hierarchy.h)
//     ..._links          over links: any transport; as schedules (schedules.h), of which several run at once
//
// Every function returns the run's failure when a rank is lost meanwhile; results are undefined then.
#pragma once

#include "run/plan.h"
#include "run/work.h"

// Is it one of those over links?
static inline bool allreduce_is_over_links(enum allreduce_path path)
{
    return path == ALLREDUCE_RING || path == ALLREDUCE_DOUBLING || path == ALLREDUCE_HALVING;
}

// "" or NULL: chosen. BHVD_ERR_ARGUMENT for an unknown name, with the known ones.
bhvd_status allreduce_path_parse(const char *name, enum allreduce_path *path, struct bhvd_error *error);

// In place on the vector that the spans make up: dst = postscale * reduce over ranks (prescale * src).
bhvd_status allreduce_shared(struct run *run, struct group *group, const struct reduction *reduction,
                             const struct span_list *list);
// By the best of the three over links, or the one that run->allreduce_path forces. The list lives as long as the plan's task.
void allreduce_plan(struct plan *plan, const struct run *run, const struct group *group, const struct reduction *reduction,
                    const struct span_list *list);
// path: the one over links that is asked for; any other: the cheapest of the three there.
void allreduce_schedule(struct schedule *schedule, enum allreduce_path path, const struct wire *wire, size_t nbytes, size_t element);
// In two levels, in a group that has a hierarchy (run/hierarchy.h): reduces within each host, lets owners of each shard of the
// vector work on it, and spreads the result within each host.
struct between;

// Plans what they do with it, in place, if they do anything. begin: its place in the vector, in bytes. BHVD_ERR_SYSTEM: the run
// has failed.
typedef bhvd_status (*between_fn)(struct run *run, const struct hierarchy *h, const struct span_list *shard, size_t begin,
                                  const struct between *between, struct plan *plan);

struct between {
    between_fn plan;
    struct reduction reduction;         // for it; what is not used may be left 0
    const struct work *work;            // lives as long as the task
    size_t shard_nbytes;                // at most
    int depth;                          // shards begun and not ended, at most BETWEEN_DEPTH
};

enum { BETWEEN_DEPTH = 4 };

// Makes the plan a task, which takes the list.
bhvd_status hierarchical_plan(struct plan *plan, struct run *run, struct group *group, const struct reduction *within,
                              struct span_list *list, const struct between *between);
bhvd_status allreduce_hierarchical(struct plan *plan, struct run *run, struct group *group, const struct reduction *reduction,
                                   struct span_list *list);

// Every span is one tensor. The group's size is a power of two. Float dtypes.
bhvd_status allreduce_adasum(struct run *run, struct group *group, const struct reduction *reduction,
                             const struct span_list *list);

// Keeps the bytes of n members' parts, and behind them where each begins: 2 n numbers. Returns the latter.
static inline size_t *parts_keep(size_t *kept, const size_t *part, size_t n)
{
    size_t *place = kept + n, at = 0;
    for (size_t i = 0; i < n; at += part[i++]) {
        kept[i] = part[i];
        place[i] = at;
    }
    return place;
}

// part[i]: bytes of the vector that rank i of the group gets, in rank order; dst: this rank's part.
bhvd_status reducescatter_shared(struct run *run, struct group *group, const struct reduction *reduction,
                                 const struct span_list *src, void *dst, const size_t *part);
// A task. The group has a hierarchy, and its hosts hold equally many members. The first part is the longest. dst may begin where
// src does.
bhvd_status reducescatter_hierarchical(struct plan *plan, struct run *run, struct group *group,
                                       const struct reduction *reduction, const void *src, void *dst, const size_t *part);

// part[i]: bytes that rank i contributes; dst holds all of them, in rank order. src may lie in dst at its place.
bhvd_status allgather_shared(struct run *run, struct group *group, const void *src,
                             const struct span_list *dst, const size_t *part);
// A task. The group has a hierarchy.
bhvd_status allgather_hierarchical(struct plan *plan, struct run *run, struct group *group, const void *src, void *dst,
                                   const size_t *part);

// src and dst: the parts one after the other.
bhvd_status alltoall_shared(struct run *run, struct group *group, const void *src, void *dst,
                            const struct parts *parts);

// root: position in the group. The root's dst may equal src.
bhvd_status broadcast_shared(struct run *run, struct group *group, int root, const void *src, void *dst,
                             size_t nbytes);
void broadcast_plan(struct plan *plan, const struct group *group, int root, const void *src, void *dst, size_t nbytes, bool chain);
// A task. The group has a hierarchy, and the root's local index exists on every host.
bhvd_status broadcast_hierarchical(struct plan *plan, struct run *run, struct group *group, int root, const void *src,
                                   void *dst, size_t nbytes);
