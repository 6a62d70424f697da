// Where the members of a group are, and the two smaller groups that a collective over several hosts works in:
//
//     local    the members on this host: shared memory, so every ..._shared collective takes it
//     cross    the members with this rank's local index, one on each host: links, so every other collective takes it
//
//              host 0   host 1
//     index 0    0        3      <- cross of ranks 0 and 3
//     index 1    1        4
//     index 2    2               <- no cross: host 1 has no third member
//                ^ local of ranks 0, 1 and 2
//
// So data is reduced within the hosts first, each of `shards` local members takes its share across the hosts, and the
// result spreads within the hosts. The hosts may hold different numbers of members; there are as many shards as the
// smallest host has members, so that a shard has an owner on every host.
#pragma once

#include "run/group.h"

struct hierarchy {
    int hosts;                  // at least 2, counted in the order of their first members
    int host, index;            // this rank's
    int shards;                 // members of the smallest host
    int largest;                // members of the largest host; equal to `shards` when all hosts hold equally many
    int *first;                 // hosts + 1 entries: where a host begins in `members`
    int *members;               // positions in the group, host by host
    struct group *local;
    struct group *cross;  // by host; NULL when index >= shards
};

// Sets group->hierarchy, or leaves it NULL: not a member, one host, no host with two members, or no shared area. All
// members come to the same answer. BHVD_ERR_SYSTEM: no memory.
bhvd_status hierarchy_create(struct run *run, struct group *group);
void hierarchy_destroy(struct hierarchy *hierarchy);

static inline int hierarchy_members_of(const struct hierarchy *h, int host) { return h->first[host + 1] - h->first[host]; }

// Position in the group of a host's member.
static inline int hierarchy_member(const struct hierarchy *h, int host, int index)
{
    return h->members[h->first[host] + index];
}

// Where a member, given by its position in the group, is.
void hierarchy_find(const struct hierarchy *h, int position, int *host, int *index);

// Cuts `nbytes` into the shards: part[i] for every local member, in rank order, 0 from index `shards` on. The same on
// all hosts. Shards are whole cache lines, but for the last; what is too little to be cut is the first's.
void hierarchy_cut(const struct hierarchy *h, size_t nbytes, size_t *part);
