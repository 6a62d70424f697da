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
    struct hierarchy *hierarchy;        // NULL: not a member, no shared area, one host, or no host holds two members
};

// Initializes the group of these global ranks, with this rank at position `rank`; on one host it uses the area of this id, if there
// is one. All members get the same hierarchy. False: no memory, and nothing is left behind.
bool group_init(struct group *group, const struct executor *exec, const int32_t *ranks, int size, int rank, int id,
                uint64_t first_block);
void group_fini(struct group *group);

// The link to a member, by its position.
static inline struct link *group_link(struct executor *exec, const struct group *group, int index)
{
    return &exec->connections.links[group->ranks[index]];
}

// The hosts of a group's members, and the two smaller groups used by a collective over several hosts:
//
//     local    the members on this host: shared memory, so it can run every ..._shared collective
//     cross    the members with this rank's local index, one on each host: links, so it can run every other collective
//
//              host 0   host 1
//     index 0    0        3      <- cross of ranks 0 and 3
//     index 1    1        4
//     index 2    2               <- no cross: host 1 has no third member
//                ^ local of ranks 0, 1 and 2
//
// Data is reduced within the hosts first, each of `shards` local members sends its share between the hosts, and the
// result is distributed within the hosts. Hosts may hold different numbers of members; there are as many shards as the
// smallest host has members, so that a shard has an owner on every host.

struct hierarchy {
    int hosts;                  // at least 2, numbered in the order of their first members
    int host, index;            // this rank's
    int shards;                 // members of the smallest host
    int largest;                // members of the largest host; equal to `shards` when all hosts hold equally many
    int *first;                 // hosts + 1 entries: each host's first index in `members`
    int *members;               // positions in the group, host by host
    struct group *local;
    struct group *cross;        // by host; NULL when index >= shards
    struct group parts[2];      // these two
};

static inline int hierarchy_members_of(const struct hierarchy *h, int host) { return h->first[host + 1] - h->first[host]; }

// The group of this rank's messages; without any, that of its host.
static inline const struct group *hierarchy_senders(const struct hierarchy *h) { return h->cross ? h->cross : h->local; }

// Position in the group of a host's member.
static inline int hierarchy_member(const struct hierarchy *h, int host, int index)
{
    return h->members[h->first[host] + index];
}

// The host and local index of a member, given by its position in the group.
void hierarchy_find(const struct hierarchy *h, int position, int *host, int *index);

// The shard of the member with this local index, of `nbytes`; empty from index `shards` on. Equal on all hosts. All shards but the
// last are whole cache lines; sizes too small to split go to the first.
struct byte_range hierarchy_shard(const struct hierarchy *h, size_t nbytes, int index);
// Their sizes, by local member.
void hierarchy_cut(const struct hierarchy *h, size_t nbytes, size_t *part);
