#include "collective/hierarchy.h"

#include <stdlib.h>

enum {
    LINE = 64,
    SHARD_MIN_BYTES = 1024      // below, a second message costs more than a longer one
};

// Groups the members by host.
static bool find_hosts(const bhvd_context *ctx, const struct process_set *set, struct hierarchy *h)
{
    const int *host_of = ctx->connections.host_of;
    h->first = calloc((size_t)set->size + 1, sizeof *h->first);
    h->members = malloc((size_t)set->size * sizeof *h->members);
    if (!h->first || !h->members)
        return false;
    int placed = 0;
    h->shards = set->size;
    for (int i = 0; i < set->size; i++) {
        bool seen = false;
        for (int j = 0; j < placed && !seen; j++)
            seen = host_of[set->ranks[h->members[j]]] == host_of[set->ranks[i]];
        if (seen)
            continue;
        int begin = placed;
        for (int j = i; j < set->size; j++) {
            if (host_of[set->ranks[j]] != host_of[set->ranks[i]])
                continue;
            if (j == set->rank) {
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

// The set of `size` members of `set` at `positions`; this rank is the one at `rank`.
static struct process_set *subset(const bhvd_context *ctx, const struct process_set *set, const int *positions, int size,
                                  int rank, bool shared)
{
    struct process_set *part = calloc(1, sizeof *part);
    if (!part)
        return NULL;
    *part = (struct process_set){.id = set->id, .number = set->number, .size = size, .rank = rank, .shared = shared,
                                 .first_block = set->first_block, .block = set->block};
    part->ranks = malloc((size_t)size * sizeof *part->ranks);
    part->local_indices = malloc((size_t)size * sizeof *part->local_indices);
    for (int i = 0; i < size && part->ranks && part->local_indices; i++) {
        part->ranks[i] = set->ranks[positions[i]];
        part->local_indices[i] = part->ranks[i] == ctx->options.rank ? ctx->connections.local_index
                                                                     : ctx->connections.links[part->ranks[i]].local_index;
    }
    return part;
}

static void subset_destroy(struct process_set *part)
{
    if (part) {
        free(part->ranks);
        free(part->local_indices);
    }
    free(part);
}

static bool is_complete(const struct process_set *part) { return part && part->ranks && part->local_indices; }

bhvd_status hierarchy_create(bhvd_context *ctx, struct process_set *set)
{
    if (set->rank < 0 || set->id >= HOST_AREAS)
        return BHVD_OK;
    struct hierarchy *h = calloc(1, sizeof *h);
    if (!h || !find_hosts(ctx, set, h)) {
        hierarchy_destroy(h);
        return BHVD_ERR_SYSTEM;
    }
    if (h->hosts < 2 || h->largest < 2) {
        hierarchy_destroy(h);
        return BHVD_OK;
    }
    set->hierarchy = h;         // destroyed with the set from here on
    h->local = subset(ctx, set, h->members + h->first[h->host], hierarchy_members_of(h, h->host), h->index, true);
    if (!is_complete(h->local))
        return BHVD_ERR_SYSTEM;
    if (h->index >= h->shards)
        return BHVD_OK;
    int *peers = malloc((size_t)h->hosts * sizeof *peers);
    for (int host = 0; host < h->hosts && peers; host++)
        peers[host] = hierarchy_member(h, host, h->index);
    h->cross = peers ? subset(ctx, set, peers, h->hosts, h->host, false) : NULL;
    free(peers);
    return is_complete(h->cross) ? BHVD_OK : BHVD_ERR_SYSTEM;
}

void hierarchy_destroy(struct hierarchy *h)
{
    if (!h)
        return;
    subset_destroy(h->local);
    subset_destroy(h->cross);
    free(h->first);
    free(h->members);
    free(h);
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

void hierarchy_cut(const struct hierarchy *h, size_t nbytes, size_t *part)
{
    size_t shard = (nbytes + (size_t)h->shards - 1) / (size_t)h->shards;
    shard = shard < SHARD_MIN_BYTES ? SHARD_MIN_BYTES : (shard + LINE - 1) / LINE * LINE;
    for (int i = 0; i < h->local->size; i++) {
        part[i] = i >= h->shards ? 0 : nbytes < shard ? nbytes : shard;
        nbytes -= part[i];
    }
}
