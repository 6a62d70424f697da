#include "core/engine/communicators.h"

#include "gpu/nccl.h"

void communicators_check(bhvd_context *ctx)
{
    for (int id = 0; id < ctx->sets.high && !ctx->exec.failure.status; id++) {
        struct process_set *set = process_set_get(&ctx->sets, (uint32_t)id);
        if (set)
            nccl_poll(&ctx->exec, set->nccl);
    }
}

void communicators_abort(bhvd_context *ctx)
{
    struct nccl_comm *comms[PROCESS_SET_MAX];
    int count = 0;
    for (int id = 0; id < ctx->sets.high; id++) {
        struct process_set *set = process_set_get(&ctx->sets, (uint32_t)id);
        if (set && set->nccl)
            comms[count++] = set->nccl;
    }
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

static int are_idle(struct executor *exec, void *arg)
{
    bhvd_context *ctx = arg;
    (void)exec;
    for (int id = 0; id < ctx->sets.high; id++) {
        const struct process_set *set = process_set_get(&ctx->sets, (uint32_t)id);
        if (set && nccl_is_busy(set->nccl))
            return false;
    }
    return true;
}

void communicators_await(bhvd_context *ctx) { executor_wait_gpu(&ctx->exec, are_idle, ctx); }

void communicators_close(bhvd_context *ctx, struct process_set *set)
{
    struct nccl_comm *comm = replace(ctx, set, NULL);
    if (!nccl_finish(comm))
        nccl_abort(&comm, 1);
    nccl_close(comm);
}

void communicators_close_all(bhvd_context *ctx)
{
    bool finished = true;
    for (int id = 0; id < ctx->sets.high && finished; id++) {
        const struct process_set *set = process_set_get(&ctx->sets, (uint32_t)id);
        finished = !set || nccl_finish(set->nccl);
    }
    if (!finished)
        communicators_abort(ctx);
    for (int id = 0; id < ctx->sets.high; id++) {
        struct process_set *set = process_set_get(&ctx->sets, (uint32_t)id);
        if (set)
            nccl_close(replace(ctx, set, NULL));
    }
}
