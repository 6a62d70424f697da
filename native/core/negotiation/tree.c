#include "core/negotiation/tree.h"

#include <stdlib.h>

#include "base/status.h"

bhvd_status tree_fanout(const struct bhvd_context_options *options, int *fanout, struct bhvd_error *error)
{
    const char *name = options->negotiation ? options->negotiation : "";
    int wanted = options->negotiation_fanout ? options->negotiation_fanout : TREE_FANOUT;
    if (wanted < 1)
        return error_set(error, BHVD_ERR_ARGUMENT, "BAGUA_HVD_NEGOTIATION_FANOUT=%d: a relay needs 1 child or more", wanted);
    if (strcmp(name, "star") == 0)
        *fanout = TREE_STAR;
    else if (strcmp(name, "tree") == 0)
        *fanout = wanted;
    else if (!name[0])
        *fanout = options->size > TREE_STAR_RANKS ? wanted : TREE_STAR;
    else
        return error_set(error, BHVD_ERR_ARGUMENT, "BAGUA_HVD_NEGOTIATION is \"%s\"; known are star, tree", name);
    return BHVD_OK;
}

bool tree_parents(const int *host_of, int size, int fanout, int *parents)
{
    int *memory = calloc(3 * (size_t)size + 1, sizeof *memory);
    if (!memory)
        return false;
    int *by_host = memory;              // ranks, host by host
    int *first = memory + size, *seen = first + size + 1;       // by host: its index in by_host; number of its ranks seen
    for (int rank = 0; rank < size; rank++)
        first[host_of[rank] + 1]++;
    for (int host = 0; host < size; host++)
        first[host + 1] += first[host];
    for (int rank = 0; rank < size; rank++) {
        const int host = host_of[rank], before = seen[host]++;
        by_host[first[host] + before] = rank;
        if (fanout == TREE_STAR)
            parents[rank] = rank ? 0 : -1;
        else if (before)
            parents[rank] = by_host[first[host] + (before - 1) / fanout];
        else
            parents[rank] = host ? by_host[first[(host - 1) / fanout]] : -1;
    }
    free(memory);
    return true;
}

bool tree_choose(const struct bhvd_context_options *options, const int *host_of, bool *talks_to)
{
    int fanout = 0, *parents = malloc((size_t)options->size * sizeof *parents);
    const bool there = parents && !tree_fanout(options, &fanout, NULL) && tree_parents(host_of, options->size, fanout, parents);
    for (int other = 0; other < options->size && there; other++)
        talks_to[other] = other == 0 || options->rank == 0 || parents[other] == options->rank || parents[options->rank] == other;
    free(parents);
    return there;
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
    int *parents = malloc((size_t)size * sizeof *parents);
    tree->towards = malloc((size_t)size * sizeof *tree->towards);
    bool ok = parents && tree->towards && tree_parents(host_of, size, fanout, parents);
    for (int other = 0; other < size && ok; other++) {   // a parent comes before its children
        const int parent = parents[other];
        tree->parent = other == rank ? parent : tree->parent;
        tree->towards[other] = other == rank || parent < 0 ? -1 : parent == rank ? tree->child_count : tree->towards[parent];
        ok = parent != rank || !add_child(tree, other, size);
        if (ok && tree->towards[other] >= 0)
            rank_set_add(&tree->children[tree->towards[other]].below, other);
    }
    free(parents);
    return ok ? BHVD_OK : BHVD_ERR_SYSTEM;
}

void tree_fini(struct tree *tree)
{
    for (int i = 0; i < tree->child_count; i++) {
        rank_set_fini(&tree->children[i].below);
        bytes_fini(&tree->children[i].out);
    }
    free(tree->children);
    free(tree->towards);
    *tree = (struct tree){0};
}

struct tree_child *tree_child(struct tree *tree, int rank)
{
    struct tree_child *child = tree_child_towards(tree, rank);
    return child && child->rank == rank ? child : NULL;
}

struct tree_child *tree_child_towards(struct tree *tree, int rank)
{
    const int index = tree->towards[rank];
    return index < 0 ? NULL : &tree->children[index];
}
