// A group: the ranks that execute a collective together, each with a position; the executor's view of a process set.
#pragma once

#include "executor/executor.h"

struct group {
    int id;                     // of the area (shared.h); all groups derived from a process set have its id
    int size;
    int rank;                   // this rank's position, -1: not a member
    int32_t *ranks;             // global ranks
    // The area that the members share when all of them are on this host.
    bool shared;
    int32_t *local_indices;     // by position
    uint64_t first_block;       // the group's first block in its area, after all blocks of an older group
    uint64_t block[SHM_SLOTS];  // the next block of each, equal on all members between two pipelines (shared.h)
    const void *users[SHM_SLOTS];       // the concurrent task that uses each slot; NULL: none
    struct hierarchy *hierarchy;        // hierarchy.h; NULL: one host, or no host holds two members
};

// Initializes the group of these global ranks, with this rank at position `rank`, without a hierarchy; on one host it uses the area
// of this id, if there is one. False: no memory, and nothing is left behind.
bool group_init(struct group *group, const struct executor *exec, const int32_t *ranks, int size, int rank, int id,
                uint64_t first_block);
void group_fini(struct group *group);      // after hierarchy_destroy

// The link to a member, by its position.
static inline struct link *group_link(struct executor *exec, const struct group *group, int index)
{
    return &exec->connections.links[group->ranks[index]];
}
