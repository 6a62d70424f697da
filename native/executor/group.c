#include "executor/group.h"

#include <stdlib.h>
#include <string.h>

// positions: which of these ranks; NULL: the first `size`.
static bool init(struct group *group, const struct executor *exec, const int32_t *ranks, const int *positions, int size, int rank,
                 int id, uint64_t first_block)
{
    const struct connections *c = &exec->connections;
    *group = (struct group){.id = id, .size = size, .rank = rank, .shared = rank >= 0 && id < SHM_AREAS,
                            .first_block = first_block};
    for (int slot = 0; slot < SHM_SLOTS; slot++)
        group->block[slot] = first_block;
    group->ranks = malloc((size_t)size * sizeof *group->ranks);
    group->local_indices = malloc((size_t)size * sizeof *group->local_indices);
    for (int i = 0; i < size && group->ranks && group->local_indices; i++) {
        group->ranks[i] = ranks[positions ? positions[i] : i];
        const int of = group->ranks[i];
        group->local_indices[i] = of == c->rank ? c->local_index : c->links[of].local_index;
        if (group->local_indices[i] < 0)
            group->shared = false;
    }
    return group->ranks && group->local_indices;
}

// ----------------------------------------------------------------------------------------------------------- hierarchy

enum { SHARD_MIN_BYTES = 1024 };        // below this size a second message costs more than a longer one

// Groups the members by host.
static bool find_hosts(const struct executor *exec, const struct group *group, struct hierarchy *h)
{
    const int *host_of = exec->connections.host_of;
    h->first = calloc((size_t)group->size + 1, sizeof *h->first);
    h->members = malloc((size_t)group->size * sizeof *h->members);
    if (!h->first || !h->members)
        return false;
    int placed = 0;
    h->shards = group->size;
    for (int i = 0; i < group->size; i++) {
        bool seen = false;
        for (int j = 0; j < placed && !seen; j++)
            seen = host_of[group->ranks[h->members[j]]] == host_of[group->ranks[i]];
        if (seen)
            continue;
        int begin = placed;
        for (int j = i; j < group->size; j++) {
            if (host_of[group->ranks[j]] != host_of[group->ranks[i]])
                continue;
            if (j == group->rank) {
                h->host = h->hosts;
                h->index = placed - begin;
            }
            h->members[placed++] = j;
        }
        h->first[++h->hosts] = placed;
        h->shards = placed - begin < h->shards ? placed - begin : h->shards;
        h->largest = placed - begin > h->largest ? placed - begin : h->largest;
    }
    return true;
}

static void destroy_hierarchy(struct hierarchy *h)
{
    if (!h)
        return;
    group_fini(&h->parts[0]);
    group_fini(&h->parts[1]);
    free(h->first);
    free(h->members);
    free(h);
}

// Sets group->hierarchy, or leaves it NULL. False: no memory.
static bool create_hierarchy(const struct executor *exec, struct group *group)
{
    if (group->rank < 0 || group->id >= SHM_AREAS)
        return true;
    struct hierarchy *h = group->hierarchy = calloc(1, sizeof *h);
    if (!h || !find_hosts(exec, group, h))
        return false;
    if (h->hosts < 2 || h->largest < 2) {
        destroy_hierarchy(h);
        group->hierarchy = NULL;
        return true;
    }
    h->local = &h->parts[0];
    if (!init(h->local, exec, group->ranks, h->members + h->first[h->host], hierarchy_members_of(h, h->host), h->index, group->id,
              group->first_block))
        return false;
    if (h->index >= h->shards)
        return true;
    int *peers = malloc((size_t)h->hosts * sizeof *peers);
    for (int host = 0; host < h->hosts && peers; host++)
        peers[host] = hierarchy_member(h, host, h->index);
    h->cross = &h->parts[1];
    const bool done = peers && init(h->cross, exec, group->ranks, peers, h->hosts, h->host, group->id, group->first_block);
    free(peers);
    return done;
}

bool group_init(struct group *group, const struct executor *exec, const int32_t *ranks, int size, int rank, int id,
                uint64_t first_block)
{
    if (init(group, exec, ranks, NULL, size, rank, id, first_block) && create_hierarchy(exec, group))
        return true;
    group_fini(group);
    return false;
}

void group_fini(struct group *group)
{
    destroy_hierarchy(group->hierarchy);
    free(group->ranks);
    free(group->local_indices);
    *group = (struct group){0};
}

void hierarchy_find(const struct hierarchy *h, int position, int *host, int *index)
{
    for (*host = 0; *host < h->hosts; ++*host) {
        for (*index = 0; *index < hierarchy_members_of(h, *host); ++*index) {
            if (hierarchy_member(h, *host, *index) == position)
                return;
        }
    }
}

struct byte_range hierarchy_shard(const struct hierarchy *h, size_t nbytes, int index)
{
    size_t shard = (nbytes + (size_t)h->shards - 1) / (size_t)h->shards;
    shard = shard < SHARD_MIN_BYTES ? SHARD_MIN_BYTES : size_round_up(shard, CACHE_LINE);
    const size_t begin = index < h->shards ? size_min((size_t)index * shard, nbytes) : nbytes;
    return (struct byte_range){begin, size_min(shard, nbytes - begin)};
}

void hierarchy_cut(const struct hierarchy *h, size_t nbytes, size_t *part)
{
    for (int i = 0; i < h->local->size; i++)
        part[i] = hierarchy_shard(h, nbytes, i).nbytes;
}
