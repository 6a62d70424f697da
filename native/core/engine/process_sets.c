#include "core/engine/process_sets.h"

#include "base/status.h"
#include "core/context/operation.h"
#include "core/negotiation/coordinator.h"
#include "core/negotiation/pairwise.h"
#include "gpu/nccl.h"

bhvd_status execute_process_set_add(bhvd_context *ctx, struct bhvd_operation *op, struct bhvd_error *error)
{
    const int32_t *ranks = op->coll.args.splits;
    const int size = (int)op->coll.args.split_count;
    int id = -1;
    bhvd_status status = BHVD_OK;
    for (int i = 0; i < size && !status; i++) {
        if (ranks[i] < 0 || ranks[i] >= ctx->options.size || (i && ranks[i] == ranks[i - 1]))
            status = error_set(error, BHVD_ERR_ARGUMENT, "a process set holds ranks from 0 to %d, each at most once; rank %d is "
                               "out of range or repeated", ctx->options.size - 1, ranks[i]);
    }
    pthread_mutex_lock(&ctx->sets_lock);
    const bool of_members = op->coll.args.root_rank != 0;
    const struct process_set *same = of_members ? process_set_of(&ctx->sets, ranks, size, true) : NULL;
    if (!status && same)
        id = same->group.id;
    else if (!status)
        status = process_set_add(&ctx->sets, &ctx->exec, ranks, size, of_members, &id, error);
    pthread_mutex_unlock(&ctx->sets_lock);
    if (status == BHVD_ERR_SYSTEM)
        status = executor_fail_with(&ctx->exec, error);         // the other ranks have the set
    op->value = id;
    bhvd_status added = coordinator_set_added(ctx);
    return status ? status : added;
}

static int is_unused(struct executor *exec, void *arg)
{
    const struct process_set *set = arg;
    return !tasks_use_group(exec, &set->group) && !pairwise_set_waits(exec->ctx, set->number);
}

bhvd_status execute_process_set_remove(bhvd_context *ctx, struct bhvd_operation *op)
{
    int id = op->coll.args.root_rank;
    op->value = id > 0 && process_set_get(&ctx->sets, (uint32_t)id) != NULL;
    if (!op->value)
        return BHVD_OK;
    struct process_set *set = process_set_get(&ctx->sets, (uint32_t)id);
    const uint32_t number = set->number;
    bhvd_status status = BHVD_OK;
    // Its area may be reused by another set, but only after all members have read its contents. While this rank waits for
    // them it still requests operations on the set, so those are ended afterwards.
    if (set->group.shared && set->group.size > 1)
        status = shared_barrier(&ctx->exec, &set->group);
    else if (set->group.hierarchy)
        status = shared_barrier(&ctx->exec, set->group.hierarchy->local);
    pairwise_revoke(ctx, &number, NOBODY_DEPARTED);
    if (!status)
        status = executor_wait(&ctx->exec, is_unused, set, -1);
    pairwise_forget_set(ctx, number);
    communicators_await(ctx);
    communicators_close(ctx, set);
    if (!status)
        status = coordinator_set_removed(ctx, set);             // last: whatever polls may bring requests for the set
    pthread_mutex_lock(&ctx->sets_lock);
    process_set_remove(&ctx->sets, (uint32_t)id);
    pthread_mutex_unlock(&ctx->sets_lock);
    context_abort_set(ctx, number);
    return status;
}

// ------------------------------------------------------------------------------------------------------- communicators

void communicators_check(bhvd_context *ctx)
{
    for (struct process_set *set = NULL; !ctx->exec.failure.status && (set = process_set_next(&ctx->sets, set));)
        nccl_poll(&ctx->exec, set->nccl);
}

void communicators_abort(bhvd_context *ctx)
{
    struct nccl_comm *comms[PROCESS_SET_MAX];
    int count = 0;
    for (struct process_set *set = NULL; (set = process_set_next(&ctx->sets, set));)
        if (set->nccl)
            comms[count++] = set->nccl;
    nccl_abort(comms, count);
}

// Under the lock, since posting threads read it.
static struct nccl_comm *replace(bhvd_context *ctx, struct process_set *set, struct nccl_comm *comm)
{
    pthread_mutex_lock(&ctx->sets_lock);
    struct nccl_comm *before = set->nccl;
    set->nccl = comm;
    pthread_mutex_unlock(&ctx->sets_lock);
    return before;
}

bhvd_status communicators_agree(bhvd_context *ctx, struct process_set *set, const struct collective *coll)
{
    struct nccl_comm *comm;
    if (set->nccl)
        return BHVD_OK;
    bhvd_status status = nccl_agree(&ctx->exec, &set->group, coll, ctx->options.nccl_hierarchical, &comm);
    replace(ctx, set, comm);
    if (status)
        nccl_abort(&comm, 1);                  // the context failed before the set had its communicator
    return status;
}

static int are_idle(struct executor *exec, void *sets)
{
    struct process_set *set = NULL;
    (void)exec;
    while ((set = process_set_next(sets, set)) && !nccl_is_busy(set->nccl))
        ;
    return !set;
}

void communicators_await(bhvd_context *ctx) { executor_wait_gpu(&ctx->exec, are_idle, &ctx->sets); }

void communicators_close(bhvd_context *ctx, struct process_set *set)
{
    struct nccl_comm *comm = replace(ctx, set, NULL);
    if (!nccl_finish(comm))
        nccl_abort(&comm, 1);
    nccl_close(comm);
}

void communicators_close_all(bhvd_context *ctx)
{
    struct process_set *set = NULL;
    while ((set = process_set_next(&ctx->sets, set)) && nccl_finish(set->nccl))
        ;
    if (set)
        communicators_abort(ctx);
    for (set = NULL; (set = process_set_next(&ctx->sets, set));)
        nccl_close(replace(ctx, set, NULL));
}
