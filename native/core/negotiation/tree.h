// The shape of the negotiation tree. A rank knows its parent and all ranks below it, but no
// others. Within a host, ranks form a tree of a given fan-out, and so do the first ranks of the hosts; rank 0 is
// the root. A star is a tree of unlimited fan-out: all others are the root's children, and there are no relays.
#pragma once

#include "core/message/rank_set.h"

#include "bagua_hvd.h"

enum {
    TREE_STAR_RANKS = 64,               // up to this many ranks a star is faster, since it has fewer hops
    TREE_FANOUT = 16,
    TREE_STAR = INT32_MAX               // unlimited fan-out
};

struct tree_child {
    int rank;
    struct rank_set below;              // the child and all ranks below it
    struct bytes out;                   // items for its next message (relay.c)
};

struct tree {
    int parent;                         // -1: the root has none
    int *towards;                       // by rank: the index of the child that is, or relays for, that rank; -1: not below
    struct tree_child *children;
    int child_count;
};

// The fan-out that the options request. BHVD_ERR_ARGUMENT: they are invalid.
bhvd_status tree_fanout(const struct bhvd_context_options *options, int *fanout, struct bhvd_error *error);

// Sets each rank's parent, always a lower rank; -1 for the root. False: no memory.
bool tree_parents(const int *host_of, int size, int fanout, int *parents);

// The ranks with which a rank negotiates and exchanges heartbeats: rank 0, its parent, its children. See transport/connect.h.
bool tree_choose(const struct bhvd_context_options *options, const int *host_of, bool *talks_to);

// host_of: by rank, the number of its host, in the order of their first ranks.
bhvd_status tree_init(struct tree *tree, const int *host_of, int size, int rank, int fanout);
void tree_fini(struct tree *tree);

// NULL: not a child.
struct tree_child *tree_child(struct tree *tree, int rank);
// The child that is, or relays for, this rank; NULL: not below.
struct tree_child *tree_child_towards(struct tree *tree, int rank);
