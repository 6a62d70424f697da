// Public functions on process sets.
#include "core/context/context.h"
#include "primitive/primitive.h"

// The properties of a set; {-1, -2, -1} if it does not exist.
struct numbers {
    int size, rank, hosts;              // hosts: -1 if this rank is not a member
};

static struct numbers numbers_of(bhvd_context *ctx, int id)
{
    struct numbers numbers = {-1, -2, -1};
    pthread_mutex_lock(&ctx->sets_lock);
    const struct process_set *set = process_set_get(&ctx->sets, (uint32_t)id);
    if (set)
        numbers = (struct numbers){set->group.size, set->group.rank, set->group.rank >= 0 ? primitive_hosts(&set->group) : -1};
    pthread_mutex_unlock(&ctx->sets_lock);
    return numbers;
}

int bhvd_process_set_size(bhvd_context *ctx, int id) { return numbers_of(ctx, id).size; }
int bhvd_process_set_rank(bhvd_context *ctx, int id) { return numbers_of(ctx, id).rank; }
int bhvd_process_set_hosts(bhvd_context *ctx, int id) { return numbers_of(ctx, id).hosts; }
