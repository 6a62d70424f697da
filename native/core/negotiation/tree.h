// The shape of the tree in which ranks negotiate: of its parent and of those below it a rank knows everything, of the
// others nothing. Within a host, ranks form a tree of a given fan-out, and so do the first ranks of the hosts; rank 0 is
// the root. A star is a tree of unlimited fan-out: all others are the root's children, and nobody relays.
#pragma once

#include "core/message/rank_set.h"

#include "bagua_hvd.h"

enum {
    TREE_STAR_RANKS = 64,               // up to so many a star is quicker: no hop more
    TREE_FANOUT = 16,
    TREE_STAR = INT32_MAX               // a fan-out: unlimited
};

struct tree_child {
    int rank;
    struct rank_set below;              // itself included
    struct bytes out;                   // what goes to it with the next message (relay.c)
};

struct tree {
    int *parents;                       // by rank; -1: the root's
    int *towards;                       // by rank, which of the children is, or relays for it; -1: it is not below
    struct tree_child *children;
    int child_count;
};

// The fan-out that the options ask for. BHVD_ERR_ARGUMENT: they ask for something else.
bhvd_status tree_fanout(const struct bhvd_context_options *options, int *fanout, struct bhvd_error *error);

// By rank, who is above it, always a lower rank; -1: the root's. False: no memory.
bool tree_parents(const int *host_of, int size, int fanout, int *parents);

// With whom a rank negotiates, and exchanges heartbeats: rank 0, its parent and its children. A choose_fn of transport/connect.h.
bool tree_choose(const struct bhvd_context_options *options, const int *host_of, bool *talks_to);

// host_of: by rank, the number of its host, counted in the order of their first ranks.
bhvd_status tree_init(struct tree *tree, const int *host_of, int size, int rank, int fanout);
void tree_fini(struct tree *tree);

// NULL: not a child.
struct tree_child *tree_child(struct tree *tree, int rank);
// The child that is, or relays for, this rank; NULL: it is not below.
struct tree_child *tree_child_towards(struct tree *tree, int rank);
