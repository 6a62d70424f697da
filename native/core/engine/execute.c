// begin() chooses between NCCL and host memory, by nccl_path_of (gpu/nccl.c); host_path_of() chooses between shared memory,
// hierarchical and links; collective/ chooses schedules over links. A function's `gpu` is for NCCL; NULL: the tensors are
// in host memory. Its `plan` is the execution's: several tensors, or dtypes, are planned one after the other, and each plan but the
// last is executed before the next is made.
#include "core/engine/engine.h"

#include <stdlib.h>

#include "base/status.h"
#include "collective/collectives.h"
#include "core/engine/process_sets.h"
#include "core/negotiation/member.h"
#include "gpu/nccl.h"
#include "gpu/staged_codes.h"
#include "gpu/staging.h"
#include "primitive/primitive.h"

enum host_path { HOST_SHARED, HOST_HIERARCHICAL, HOST_LINKS };

// Does every host have a member with this one's local index?
static bool is_on_every_host(const struct hierarchy *h, int position)
{
    int host, index;
    hierarchy_find(h, position, &host, &index);
    return index < h->shards;
}

// The path of a collective whose tensors are in host memory. Depends only on values that are equal on all members.
static enum host_path host_path_of(const struct executor *exec, const struct process_set *set, const struct collective *coll)
{
    const bool links_are_forced = set->group.size > 1 && exec->allreduce_path != ALLREDUCE_CHOSEN;
    const struct hierarchy *h = set->group.hierarchy;
    if (set->group.shared && !links_are_forced)
        return HOST_SHARED;
    if (!h || links_are_forced)
        return HOST_LINKS;
    switch (coll->args.kind) {
    case BHVD_ALLREDUCE:
    case BHVD_ALLGATHER:
        return HOST_HIERARCHICAL;
    case BHVD_REDUCESCATTER:
        return h->shards == h->largest ? HOST_HIERARCHICAL : HOST_LINKS;
    case BHVD_BROADCAST:
        return is_on_every_host(h, process_set_index(set, coll->args.root_rank)) ? HOST_HIERARCHICAL : HOST_LINKS;
    default:
        return HOST_LINKS;
    }
}

// ------------------------------------------------------------------------------------------------------- allreduce

// One rank: a copy, scaled twice as it is with several ranks.
static bhvd_status allreduce_alone(const struct reduction *reduction, const struct span_list *list)
{
    const size_t element = bhvd_dtype_size(reduction->dtype);
    for (size_t i = 0; i < list->count; i++) {
        const struct span *span = &list->spans[i];
        if (span->nbytes && span->dst != span->src)
            memcpy(span->dst, span->src, span->nbytes);
        if (reduction->prescale != 1.0)
            reduction->scale(span->dst, span->dst, reduction->prescale, span->nbytes / element);
        if (reduction->postscale != 1.0)
            reduction->scale(span->dst, span->dst, reduction->postscale, span->nbytes / element);
    }
    return BHVD_OK;
}

static void plan_reducescatter(struct plan *plan, const struct group *group, const struct reduction *reduction,
                               const struct tensor *tensor, const size_t *part)
{
    const bool loads = reduction->prescale != 1.0;
    schedule_reducescatter(plan_begin(plan, group), part, loads);
    plan->operands = (struct operands){
        .reduction = *reduction,
        .list = loads ? &plan->list : NULL,
        .input = tensor->src,
        .output = tensor->dst,
    };
    const struct tensor source = {.src = tensor->src, .nbytes = tensor->nbytes};
    plan->schedule.failed |= !span_list_add(&plan->list, &source);
}

// Executes the plan of the previous tensor or dtype, if there is one.
static bhvd_status execute_previous(struct executor *exec, struct plan *plan)
{
    return plan->group ? plan_execute(exec, plan) : BHVD_OK;
}

static bhvd_status allreduce_vector(struct executor *exec, struct group *group, const struct collective *coll,
                                    bhvd_dtype dtype, struct span_list *list, enum host_path path, struct plan *plan)
{
    struct reduction reduction = reduction_by(exec, coll, dtype, group->size);
    if (list->nbytes == 0)
        return BHVD_OK;
    if (group->size == 1)
        return allreduce_alone(&reduction, list);
    if (coll->args.op == BHVD_OP_ADASUM)
        return allreduce_adasum(exec, group, &reduction, list);
    if (path == HOST_SHARED)
        return allreduce_shared(exec, group, &reduction, list);
    if (path == HOST_HIERARCHICAL)
        return allreduce_hierarchical(plan, exec, group, &reduction, list);
    plan->list = *list;
    *list = (struct span_list){0};
    allreduce_plan(plan, exec, group, &reduction, &plan->list);
    return BHVD_OK;
}

// Fused operations have one dtype; in a grouped operation dtypes may differ, and each is reduced separately.
static bhvd_status execute_allreduce(struct executor *exec, struct group *group, struct collective *const *colls, int count,
                                     struct nccl_execution *gpu, enum host_path path, struct plan *plan)
{
    bhvd_status status = BHVD_OK;
    bool present[BHVD_DTYPE_COUNT] = {false};
    for (int i = 0; i < count; i++) {
        struct collective *coll = colls[i];
        for (size_t t = 0; t < coll->args.tensor_count; t++) {
            if (executor_allocate_result(exec, &coll->tensors[t], coll->tensors[t].dim0))
                return exec->failure.status;
            if (operation_of(coll)->inline_sum)
                memcpy(coll->tensors[t].dst, operation_of(coll)->inline_sum, coll->tensors[t].nbytes);
            present[coll->tensors[t].dtype] = true;
        }
    }
    for (int dtype = 0; dtype < BHVD_DTYPE_COUNT && !status; dtype++) {
        if (!present[dtype] || (status = execute_previous(exec, plan)))
            continue;
        struct span_list list = {0};
        if (gpu) {
            struct reduction reduction = reduction_by(exec, colls[0], dtype, group->size);
            status = nccl_allreduce(gpu, colls[0]->args.op, &reduction);
            continue;
        }
        for (int i = 0; i < count && !status; i++) {
            const struct collective *coll = colls[i];
            for (size_t t = 0; t < coll->args.tensor_count && !status && !operation_of(colls[i])->inline_sum; t++) {
                if (coll->tensors[t].dtype == (bhvd_dtype)dtype && !span_list_add(&list, &coll->tensors[t]))
                    status = executor_fail(exec, BHVD_ERR_SYSTEM, "no memory for %d fused operations", count);
            }
        }
        if (!status)
            status = allreduce_vector(exec, group, colls[0], dtype, &list, path, plan);
        span_list_fini(&list);
    }
    return status;
}

// -------------------------------------------------------------------------------------- one tensor at a time

// Rows of dim 0 that rank `index` gets in a reducescatter: the first ranks get one more if it does not divide evenly.
static int64_t rows_of(int64_t dim0, int index, int size) { return dim0 / size + (index < dim0 % size); }

static bhvd_status execute_reducescatter(struct executor *exec, struct group *group, struct collective *coll,
                                         struct tensor *tensor, size_t *part, struct nccl_execution *gpu,
                                         enum host_path path, struct plan *plan)
{
    struct reduction reduction = reduction_by(exec, coll, tensor->dtype, group->size);
    for (int i = 0; i < group->size; i++)
        part[i] = (size_t)rows_of(tensor->dim0, i, group->size) * tensor->row_nbytes;
    if (gpu)
        return nccl_reducescatter(gpu, coll, (size_t)(tensor - coll->tensors),
                                  rows_of(tensor->dim0, group->rank, group->size), &reduction, part);
    if (executor_allocate_result(exec, tensor, rows_of(tensor->dim0, group->rank, group->size)))
        return exec->failure.status;
    if (path == HOST_SHARED) {
        struct span whole = {tensor->src, NULL, tensor->nbytes};
        return reducescatter_shared(exec, group, &reduction, &(struct span_list){&whole, 1, 1, whole.nbytes}, tensor->dst,
                                    part);
    }
    if (path == HOST_HIERARCHICAL)
        return reducescatter_hierarchical(plan, exec, group, &reduction, tensor->src, tensor->dst, part);
    plan_reducescatter(plan, group, &reduction, tensor, part);
    return BHVD_OK;
}

static bhvd_status execute_allgather(struct executor *exec, struct group *group, struct collective *coll,
                                     struct tensor *tensor, const int64_t *dim0, size_t *part, struct nccl_execution *gpu,
                                     enum host_path path, struct plan *plan)
{
    int64_t rows = 0;
    for (int i = 0; i < group->size; i++) {
        part[i] = (size_t)dim0[i] * tensor->row_nbytes;
        rows += dim0[i];
    }
    if (gpu)
        return nccl_allgather(gpu, coll, (size_t)(tensor - coll->tensors), rows, part);
    if (executor_allocate_result(exec, tensor, rows))
        return exec->failure.status;
    if (path == HOST_SHARED) {
        struct span whole = {NULL, tensor->dst, tensor->result_nbytes};
        return allgather_shared(exec, group, tensor->src, &(struct span_list){&whole, 1, 1, whole.nbytes}, part);
    }
    if (path == HOST_HIERARCHICAL)
        return allgather_hierarchical(plan, exec, group, tensor->src, tensor->dst, part);
    allgather_schedule(plan_begin(plan, group), &exec->network, part);
    plan->operands = (struct operands){.input = tensor->src, .output = tensor->dst};
    return BHVD_OK;
}

static bhvd_status execute_alltoall(struct executor *exec, struct group *group, struct bhvd_operation *op,
                                    struct tensor *tensor, const int64_t *numbers, int32_t *received, size_t *bytes,
                                    struct nccl_execution *gpu, enum host_path path, struct plan *plan)
{
    const int n = group->size;
    const struct parts parts = {bytes, bytes + n, (size_t)numbers[n] * tensor->row_nbytes};
    int64_t rows = 0;
    for (int i = 0; i < n; i++) {
        bytes[i] = (size_t)operation_split(op, tensor, i, n) * tensor->row_nbytes;
        bytes[n + i] = (size_t)numbers[i] * tensor->row_nbytes;
        received[i] = (int32_t)numbers[i];
        rows += numbers[i];
    }
    if (gpu)
        return nccl_alltoall(gpu, &op->coll, (size_t)(tensor - op->coll.tensors), rows, &parts);
    if (executor_allocate_result(exec, tensor, rows))
        return exec->failure.status;
    if (path == HOST_SHARED)
        return alltoall_shared(exec, group, tensor->src, tensor->dst, &parts);
    schedule_alltoall(plan_begin(plan, group), parts.sent, parts.received);
    plan->operands = (struct operands){.input = tensor->src, .output = tensor->dst};
    return BHVD_OK;
}

static bhvd_status execute_broadcast(struct executor *exec, struct group *group, struct collective *coll, struct tensor *tensor,
                                     int root, struct nccl_execution *gpu, enum host_path path, struct plan *plan)
{
    if (gpu)
        return nccl_broadcast(gpu, coll, (size_t)(tensor - coll->tensors), root);
    if (executor_allocate_result(exec, tensor, tensor->dim0))
        return exec->failure.status;
    if (path == HOST_SHARED)
        return broadcast_shared(exec, group, root, tensor->src, tensor->dst, tensor->nbytes);
    if (path == HOST_HIERARCHICAL)
        return broadcast_hierarchical(plan, exec, group, root, tensor->src, tensor->dst, tensor->nbytes);
    const bool chain = broadcast_by_chain(group->size, &exec->network, tensor->nbytes);
    broadcast_plan(plan, group, root, tensor->src, tensor->dst, tensor->nbytes, chain);
    return BHVD_OK;
}

static bhvd_status execute_tensors(struct executor *exec, struct process_set *set, struct bhvd_operation *op,
                                   struct nccl_execution *gpu, enum host_path path, struct plan *plan)
{
    struct group *group = &set->group;
    struct collective *coll = &op->coll;
    const size_t n = (size_t)group->size;
    const size_t per_tensor = response_count(coll->args.kind, group->size);
    size_t *bytes = malloc(2 * n * sizeof *bytes);
    if (coll->args.kind == BHVD_ALLTOALL)
        op->received_splits = malloc(coll->args.tensor_count * n * sizeof *op->received_splits);
    op->received_size = n;
    bhvd_status status = BHVD_OK;
    if (!bytes || (coll->args.kind == BHVD_ALLTOALL && !op->received_splits))
        status = executor_fail(exec, BHVD_ERR_SYSTEM, "no memory for a collective of %d ranks", group->size);
    for (size_t t = 0; t < coll->args.tensor_count && !status && !(status = execute_previous(exec, plan)); t++) {
        struct tensor *tensor = &coll->tensors[t];
        const int64_t *numbers = op->response_numbers + t * per_tensor;
        if (coll->args.kind == BHVD_ALLGATHER)
            status = execute_allgather(exec, group, coll, tensor, numbers, bytes, gpu, path, plan);
        else if (coll->args.kind == BHVD_ALLTOALL)
            status = execute_alltoall(exec, group, op, tensor, numbers, op->received_splits + t * n, bytes, gpu, path, plan);
        else if (coll->args.kind == BHVD_REDUCESCATTER)
            status = execute_reducescatter(exec, group, coll, tensor, bytes, gpu, path, plan);
        else
            status = execute_broadcast(exec, group, coll, tensor, process_set_index(set, coll->args.root_rank), gpu, path, plan);
    }
    free(bytes);
    return status;
}

// ------------------------------------------------------------------------------------------ NCCL and primitives

// Uses NCCL, among all members or hierarchically, if the set has agreed on it and it supports the operation; else *gpu is NULL:
// host memory.
static bhvd_status begin(bhvd_context *ctx, struct process_set *set, const struct execution *execution, struct nccl_execution **gpu)
{
    const struct collective *coll = execution->colls[0];
    *gpu = NULL;
    if (!collective_is_on_gpu(coll))
        return BHVD_OK;
    bhvd_status status = communicators_agree(ctx, set, coll);
    const struct nccl_facts facts = nccl_facts_of(set->nccl, &set->group, coll->args.kind, coll->args.hierarchical);
    const enum nccl_path path = nccl_path_of(&facts, coll);
    if (status || path == PATH_HOST)
        return status;
    return nccl_begin(&ctx->exec, &set->group, set->nccl, path, execution->colls, execution->count, gpu);
}

// Means are encoded on the host; their residuals may be on a GPU if NCCL executed earlier operations.
static bhvd_status fetch_server_residual(struct executor *exec, const struct collective *coll)
{
    struct bhvd_error error;
    if (coll->args.kind != BHVD_C_LP_S || !coll->args.server_copy || !bhvd_device_array_fetch(coll->args.server_copy, &error))
        return BHVD_OK;
    return executor_fail(exec, error.status, "rank %d: %s", exec->connections.rank, error.message);
}

// Executes the last plan too if it cannot or need not be concurrent: a primitive within a host has no latency to hide.
static bhvd_status finish(struct executor *exec, struct plan *plan, bool at_once, bhvd_status status)
{
    return !status && at_once ? execute_previous(exec, plan) : status;
}

static bhvd_status execute_primitive(struct executor *exec, struct group *group, struct collective *coll,
                                     struct nccl_execution *gpu, struct plan *plan, struct bhvd_error *error)
{
    if (gpu)
        return coll->args.kind == BHVD_C_LP_S ? nccl_c_lp_s(gpu, coll) : nccl_d_lp_s(gpu, coll);
    const struct gpu_codes *codes = coll->staging && coll->staging->codes ? &coll->staging->codes->pinned : NULL;
    bhvd_status status = fetch_server_residual(exec, coll);
    return status ? status : primitive_execute(exec, group, coll, codes, plan, error);
}

static bhvd_status execute_collective(bhvd_context *ctx, struct process_set *set, const struct execution *execution,
                                      struct plan *plan, struct bhvd_error *error)
{
    struct executor *exec = &ctx->exec;
    struct collective *coll = execution->colls[0];
    struct nccl_execution *gpu;
    const enum host_path path = host_path_of(exec, set, coll);
    const bool is_primitive = coll->args.kind == BHVD_C_LP_S || coll->args.kind == BHVD_D_LP_S;
    bhvd_status status = begin(ctx, set, execution, &gpu);
    if (!status && is_primitive)
        status = execute_primitive(exec, &set->group, coll, gpu, plan, error);
    else if (!status && coll->args.kind == BHVD_ALLREDUCE)
        status = execute_allreduce(exec, &set->group, execution->colls, execution->count, gpu, path, plan);
    else if (!status)
        status = execute_tensors(exec, set, operation_of(coll), gpu, path, plan);
    const bool at_once = collective_is_on_gpu(coll) || (is_primitive ? set->group.shared : set->group.size == 1);
    return nccl_end(gpu, finish(exec, plan, at_once, status));
}

bhvd_status execution_run_pairwise(bhvd_context *ctx, struct bhvd_operation *op, struct plan *plan, struct bhvd_error *error)
{
    struct group *group = &process_set_find(&ctx->sets, op->key.process_set)->group;
    return primitive_execute(&ctx->exec, group, &op->coll, NULL, plan, error);
}

bhvd_status execution_run(bhvd_context *ctx, struct execution *execution, struct bhvd_error *error)
{
    struct plan *plan = &execution->plan;
    struct process_set *set = process_set_find(&ctx->sets, execution->process_set);
    struct bhvd_operation *op = operation_of(execution->colls[0]);
    if (!set || set->group.rank < 0)
        return error_set(error, BHVD_ERR_UNSUPPORTED, "the process set was removed while '%.*s' was in flight",
                         (int)op->coll.name_size, op->coll.args.name);
    switch (op->coll.args.kind) {
    case BHVD_D_FP_S:
        return finish(&ctx->exec, plan, collective_is_on_gpu(&op->coll) || set->group.shared,
                      primitive_execute(&ctx->exec, &set->group, &op->coll, NULL, plan, error));
    case BHVD_BARRIER:
        return BHVD_OK;
    case BHVD_JOIN:
        op->value = op->response_number_count ? op->response_numbers[0] : -1;
        return BHVD_OK;
    case BHVD_PROCESS_SET_ADD:
        return execute_process_set_add(ctx, op, error);
    case BHVD_PROCESS_SET_REMOVE:
        return execute_process_set_remove(ctx, op);
    default:
        return execute_collective(ctx, set, execution, plan, error);
    }
}
