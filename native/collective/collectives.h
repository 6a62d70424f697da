// Collectives over a group of ranks. Each blocks until it is done, or makes a plan that the engine runs beside others. Terms:
// docs/glossary.md. The engine calls them in the same order on all ranks.
//
//     ..._shared        all members on one host: blocks in shared memory (executor/shared.h)
//     ..._hierarchical  in shared memory within hosts, over links between them (executor/hierarchy.h)
//     schedule_...      over links: any transport; as schedules (schedules.h, ..._links.c), several of which can run at once
//
// Every function returns the executor's failure if a rank is lost in the meantime; results are undefined then.
#pragma once

#include "executor/collective.h"
#include "executor/plan.h"

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
// Plans a hierarchical allreduce, in a group that has a hierarchy (executor/hierarchy.h). Takes ownership of the list.
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
