#include "executor/group.h"

#include <stdlib.h>
#include <string.h>

#include "executor/executor.h"

static int local_index_of(const struct connections *c, int rank)
{
    return rank == c->rank ? c->local_index : c->links[rank].local_index;
}

bool group_init(struct group *group, const struct executor *exec, const int32_t *ranks, int size, int rank, int id,
                uint64_t first_block)
{
    *group = (struct group){.id = id, .size = size, .rank = rank, .shared = rank >= 0 && id < SHM_AREAS,
                            .first_block = first_block};
    for (int slot = 0; slot < SHM_SLOTS; slot++)
        group->block[slot] = first_block;
    group->ranks = malloc((size_t)size * sizeof *group->ranks);
    group->local_indices = malloc((size_t)size * sizeof *group->local_indices);
    if (!group->ranks || !group->local_indices) {
        group_fini(group);
        return false;
    }
    memcpy(group->ranks, ranks, (size_t)size * sizeof *ranks);
    for (int i = 0; i < size; i++) {
        group->local_indices[i] = local_index_of(&exec->connections, ranks[i]);
        if (group->local_indices[i] < 0)
            group->shared = false;
    }
    return true;
}

void group_fini(struct group *group)
{
    free(group->ranks);
    free(group->local_indices);
    *group = (struct group){0};
}
