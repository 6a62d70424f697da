#include "core/tree.h"

#include <stdlib.h>

#include "base/status.h"

bhvd_status tree_fanout(const struct bhvd_context_options *options, int *fanout, struct bhvd_error *error)
{
    const char *name = options->negotiation ? options->negotiation : "";
    int wanted = options->negotiation_fanout ? options->negotiation_fanout : TREE_FANOUT;
    if (wanted < 1)
        return error_set(error, BHVD_ERR_ARGUMENT, "BAGUA_HVD_NEGOTIATION_FANOUT=%d: a relay needs 1 child or more", wanted);
    if (strcmp(name, "star") == 0)
        *fanout = 0;
    else if (strcmp(name, "tree") == 0)
        *fanout = wanted;
    else if (!name[0])
        *fanout = options->size > TREE_STAR_RANKS ? wanted : 0;
    else
        return error_set(error, BHVD_ERR_ARGUMENT, "BAGUA_HVD_NEGOTIATION is \"%s\"; known are star, tree", name);
    return BHVD_OK;
}

// The rank that has so many of its host before it.
static int rank_on_host(const int *host_of, int host, int index)
{
    int rank = 0;
    while (host_of[rank] != host || index-- > 0)
        rank++;
    return rank;
}

static int parent_of(const int *host_of, int rank, int fanout)
{
    int host = host_of[rank], before = 0;
    if (fanout == 0)
        return rank ? 0 : -1;
    for (int other = 0; other < rank; other++)
        before += host_of[other] == host;
    if (before > 0)
        return rank_on_host(host_of, host, (before - 1) / fanout);
    return host > 0 ? rank_on_host(host_of, (host - 1) / fanout, 0) : -1;
}

void tree_choose(const struct bhvd_context_options *options, const int *host_of, bool *talks_to)
{
    int fanout = 0;
    for (int other = 1; other < options->size; other++)
        talks_to[other] = options->rank == 0;
    talks_to[0] = true;
    if (tree_fanout(options, &fanout, NULL))
        return;
    for (int other = 0; other < options->size; other++)
        if (other && parent_of(host_of, other, fanout) == options->rank)
            talks_to[other] = true;
    if (options->rank)
        talks_to[parent_of(host_of, options->rank, fanout)] = true;
}

// On the way from `rank` up to the root, itself included, the one whose parent is `top`; -1: top is not on the way.
static int branch_of(const int *parents, int rank, int top)
{
    while (rank >= 0 && parents[rank] != top)
        rank = parents[rank];
    return rank;
}

static bhvd_status add_child(struct tree *tree, int rank, int size)
{
    struct tree_child *children = realloc(tree->children, (size_t)(tree->child_count + 1) * sizeof *children);
    if (!children)
        return BHVD_ERR_SYSTEM;
    tree->children = children;
    struct tree_child *child = &children[tree->child_count];
    *child = (struct tree_child){.rank = rank};
    if (!rank_set_init(&child->below, size))
        return BHVD_ERR_SYSTEM;
    tree->child_count++;
    return BHVD_OK;
}

bhvd_status tree_init(struct tree *tree, const int *host_of, int size, int rank, int fanout)
{
    tree->parents = malloc((size_t)size * sizeof *tree->parents);
    if (!tree->parents)
        return BHVD_ERR_SYSTEM;
    for (int other = 0; other < size; other++)
        tree->parents[other] = parent_of(host_of, other, fanout);
    for (int other = 0; other < size; other++) {
        int branch = other == rank ? -1 : branch_of(tree->parents, other, rank);
        if (branch == other && add_child(tree, other, size))
            return BHVD_ERR_SYSTEM;
        if (branch >= 0)                // a parent comes before its children
            rank_set_add(&tree_child(tree, branch)->below, other);
    }
    return BHVD_OK;
}

static void child_fini(struct tree_child *child)
{
    rank_set_fini(&child->below);
    bytes_fini(&child->out);
}

void tree_fini(struct tree *tree)
{
    for (int i = 0; i < tree->child_count; i++)
        child_fini(&tree->children[i]);
    free(tree->children);
    free(tree->parents);
    *tree = (struct tree){0};
}

struct tree_child *tree_child(struct tree *tree, int rank)
{
    for (int i = 0; i < tree->child_count; i++) {
        if (tree->children[i].rank == rank)
            return &tree->children[i];
    }
    return NULL;
}

struct tree_child *tree_child_towards(struct tree *tree, int rank)
{
    for (int i = 0; i < tree->child_count; i++) {
        if (rank_set_has(&tree->children[i].below, rank))
            return &tree->children[i];
    }
    return NULL;
}

void tree_remove_child(struct tree *tree, int rank)
{
    struct tree_child *child = tree_child(tree, rank);
    child_fini(child);
    *child = tree->children[--tree->child_count];
}

bhvd_status tree_adopt(struct tree *tree, int rank)
{
    struct tree_child *from = tree_child_towards(tree, rank);
    int size = from->below.size, from_rank = from->rank;
    if (add_child(tree, rank, size))
        return BHVD_ERR_SYSTEM;
    struct tree_child *child = &tree->children[tree->child_count - 1];
    from = tree_child(tree, from_rank);
    for (int other = rank_set_next(&from->below, 0); other >= 0; other = rank_set_next(&from->below, other + 1)) {
        if (other == rank || branch_of(tree->parents, other, rank) >= 0)
            rank_set_add(&child->below, other);
    }
    rank_set_subtract(&from->below, &child->below);
    return BHVD_OK;
}
