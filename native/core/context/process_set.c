#include "core/context/process_set.h"

#include <stdlib.h>
#include <string.h>

#include "base/status.h"

struct process_set *process_set_get(const struct process_set_table *table, uint32_t id)
{
    return id < PROCESS_SET_MAX ? table->sets[id] : NULL;
}

struct process_set *process_set_next(const struct process_set_table *table, const struct process_set *set)
{
    int id = set ? set->group.id + 1 : 0;
    while (id < table->high && !table->sets[id])
        id++;
    return id < table->high ? table->sets[id] : NULL;
}

struct process_set *process_set_find(const struct process_set_table *table, uint32_t number)
{
    struct process_set *set = NULL;
    while ((set = process_set_next(table, set)) && set->number != number)
        ;
    return set;
}

// ranks: ascending. -1: not a member.
static int index_in(const int32_t *ranks, int size, int rank)
{
    if (rank >= 0 && rank < size && ranks[rank] == rank)
        return rank;                    // always so in the global set
    int low = 0, high = size;
    while (low < high) {
        int middle = low + (high - low) / 2;
        if (ranks[middle] < rank)
            low = middle + 1;
        else
            high = middle;
    }
    return low < size && ranks[low] == rank ? low : -1;
}

int process_set_index(const struct process_set *set, int global_rank)
{
    return index_in(set->group.ranks, set->group.size, global_rank);
}

static void process_set_destroy(struct process_set *set)
{
    if (set)
        group_fini(&set->group);
    free(set);
}

struct process_set *process_set_of(const struct process_set_table *table, const int32_t *ranks, int size, bool of_members)
{
    struct process_set *set = NULL;
    while ((set = process_set_next(table, set)) &&
           ((set->group.id != 0 && set->of_members != of_members) || set->group.size != size ||
            memcmp(set->group.ranks, ranks, (size_t)size * sizeof *ranks) != 0))
        ;
    return set;
}

bhvd_status process_set_add(struct process_set_table *table, struct executor *exec, const int32_t *ranks, int size,
                            bool of_members, int *id, struct bhvd_error *error)
{
    const struct process_set *same = process_set_of(table, ranks, size, of_members);
    if (same)
        return error_set(error, BHVD_ERR_ARGUMENT, "Attempted to add a duplicate process set: set %d has these "
                         "%d ranks already.", same->group.id, size);
    int free_id = 0;
    while (free_id < PROCESS_SET_MAX && table->sets[free_id])
        free_id++;
    if (free_id == PROCESS_SET_MAX)
        return error_set(error, BHVD_ERR_ARGUMENT, "there are %d process sets already; remove one", PROCESS_SET_MAX);
    struct process_set *set = calloc(1, sizeof *set);
    if (set) {
        set->number = (uint32_t)++table->generation;
        set->of_members = of_members;
    }
    // Block numbers in an area start from the set's generation, after those of any older set.
    if (!set || !group_init(&set->group, exec, ranks, size, index_in(ranks, size, exec->connections.rank), free_id,
                            table->generation << 40)) {
        process_set_destroy(set);
        return error_set(error, BHVD_ERR_SYSTEM, "no memory for a process set of %d ranks", size);
    }
    table->sets[free_id] = set;
    table->high = free_id >= table->high ? free_id + 1 : table->high;
    *id = free_id;
    return BHVD_OK;
}

void process_set_remove(struct process_set_table *table, uint32_t id)
{
    struct process_set *set = process_set_get(table, id);
    if (set) {
        table->sets[id] = NULL;
        process_set_destroy(set);
    }
}

void process_set_table_fini(struct process_set_table *table)
{
    for (uint32_t id = 0; id < PROCESS_SET_MAX; id++)
        process_set_remove(table, id);
}
