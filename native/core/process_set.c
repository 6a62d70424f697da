#include "core/process_set.h"

#include <stdlib.h>
#include <string.h>

#include "base/status.h"
#include "collective/hierarchy.h"
#include "core/context.h"

struct process_set *process_set_get(const struct process_set_table *table, uint32_t id)
{
    return id < PROCESS_SET_MAX ? table->sets[id] : NULL;
}

struct process_set *process_set_find(const struct process_set_table *table, uint32_t number)
{
    for (int i = 0; i < table->high; i++) {
        if (table->sets[i] && table->sets[i]->number == number)
            return table->sets[i];
    }
    return NULL;
}

int process_set_index(const struct process_set *set, int global_rank)
{
    if (global_rank < set->size && set->ranks[global_rank] == global_rank)
        return global_rank;             // so it is in the global set
    int low = 0, high = set->size;
    while (low < high) {
        int middle = low + (high - low) / 2;
        if (set->ranks[middle] < global_rank)
            low = middle + 1;
        else
            high = middle;
    }
    return low < set->size && set->ranks[low] == global_rank ? low : -1;
}

static void process_set_destroy(struct process_set *set)
{
    if (!set)
        return;
    hierarchy_destroy(set->hierarchy);
    free(set->ranks);
    free(set->local_indices);
    free(set);
}

static int local_index_of(const struct connections *c, int rank)
{
    return rank == c->rank ? c->local_index : c->links[rank].local_index;
}

static struct process_set *process_set_create(bhvd_context *ctx, const int32_t *ranks, int size, int id)
{
    struct process_set *set = calloc(1, sizeof *set);
    if (!set)
        return NULL;
    set->id = id;
    set->size = size;
    set->ranks = malloc((size_t)size * sizeof *set->ranks);
    set->local_indices = malloc((size_t)size * sizeof *set->local_indices);
    if (!set->ranks || !set->local_indices) {
        process_set_destroy(set);
        return NULL;
    }
    memcpy(set->ranks, ranks, (size_t)size * sizeof *ranks);
    set->rank = process_set_index(set, ctx->options.rank);
    set->shared = set->rank >= 0 && id < HOST_AREAS;
    for (int i = 0; i < size; i++) {
        set->local_indices[i] = local_index_of(&ctx->connections, ranks[i]);
        if (set->local_indices[i] < 0)
            set->shared = false;
    }
    return set;
}

bhvd_status process_set_add(bhvd_context *ctx, const int32_t *ranks, int size, int *id, struct bhvd_error *error)
{
    struct process_set_table *table = &ctx->sets;
    int free_id = -1;
    for (int i = 0; i < PROCESS_SET_MAX; i++) {
        const struct process_set *set = table->sets[i];
        if (!set) {
            if (free_id < 0)
                free_id = i;
        } else if (set->size == size && memcmp(set->ranks, ranks, (size_t)size * sizeof *ranks) == 0) {
            return error_set(error, BHVD_ERR_ARGUMENT, "Attempted to add a duplicate process set: set %d has these "
                             "%d ranks already.", i, size);
        }
    }
    if (free_id < 0)
        return error_set(error, BHVD_ERR_ARGUMENT, "there are %d process sets already; remove one", PROCESS_SET_MAX);
    struct process_set *set = process_set_create(ctx, ranks, size, free_id);
    if (set) {
        set->number = (uint32_t)++table->generation;
        set->first_block = set->block = table->generation << 40;
    }
    if (!set || hierarchy_create(ctx, set)) {
        process_set_destroy(set);
        return error_set(error, BHVD_ERR_SYSTEM, "no memory for a process set of %d ranks", size);
    }
    table->sets[free_id] = set;
    table->high = free_id >= table->high ? free_id + 1 : table->high;
    *id = free_id;
    return BHVD_OK;
}

void process_set_remove(bhvd_context *ctx, uint32_t id)
{
    struct process_set *set = process_set_get(&ctx->sets, id);
    if (set) {
        ctx->sets.sets[id] = NULL;
        process_set_destroy(set);
    }
}

void process_set_table_fini(struct process_set_table *table)
{
    for (int i = 0; i < PROCESS_SET_MAX; i++) {
        process_set_destroy(table->sets[i]);
        table->sets[i] = NULL;
    }
}

int bhvd_process_set_size(bhvd_context *ctx, int id)
{
    pthread_mutex_lock(&ctx->sets_lock);
    const struct process_set *set = process_set_get(&ctx->sets, (uint32_t)id);
    int size = set ? set->size : -1;
    pthread_mutex_unlock(&ctx->sets_lock);
    return size;
}

int bhvd_process_set_rank(bhvd_context *ctx, int id)
{
    pthread_mutex_lock(&ctx->sets_lock);
    const struct process_set *set = process_set_get(&ctx->sets, (uint32_t)id);
    int rank = set ? set->rank : -2;
    pthread_mutex_unlock(&ctx->sets_lock);
    return rank;
}

int bhvd_process_set_ranks(bhvd_context *ctx, int id, int32_t *ranks, int capacity)
{
    pthread_mutex_lock(&ctx->sets_lock);
    const struct process_set *set = process_set_get(&ctx->sets, (uint32_t)id);
    int size = set ? set->size : -1;
    if (set)
        memcpy(ranks, set->ranks, (size_t)(capacity < size ? capacity : size) * sizeof *ranks);
    pthread_mutex_unlock(&ctx->sets_lock);
    return size;
}
