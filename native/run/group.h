// A group: the ranks that execute something together, each with a position. What a process set is to an execution.
#pragma once

#include "run/run.h"

struct group {
    int id;                     // of the staging area (shared.h); all groups that a process set is made of have its id
    int size;
    int rank;                   // this rank's position, -1: not a member
    int32_t *ranks;             // global ranks
    // The staging area that the members share when all of them are on this host.
    bool shared;
    int32_t *local_indices;     // by position
    uint64_t first_block;       // of this group in its area, beyond all of an older one
    uint64_t block[HOST_LANES]; // the next one of each lane, equal on all members between two pipelines (shared.h)
    int lane;                   // of the pipeline that a step is being done of
    const void *users[HOST_LANES];      // whose pipelines go there; NULL: nobody's that goes on beside others
    struct hierarchy *hierarchy;        // hierarchy.h; NULL: one host, or no host holds two members
};

// The group of these global ranks, of which this one is at position `rank`, without a hierarchy; on one host it shares an area
// if there is one of this id. False: no memory, and nothing is left.
bool group_init(struct group *group, const struct run *run, const int32_t *ranks, int size, int rank, int id,
                uint64_t first_block);
void group_fini(struct group *group);      // after hierarchy_destroy

// The link to a member, by its position.
static inline struct link *group_link(struct run *run, const struct group *group, int index)
{
    return &run->connections.links[group->ranks[index]];
}
