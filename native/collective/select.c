// Runs an execution: the only place that decides which algorithm serves which case.
// gpu: the execution goes by NCCL; NULL: what there is, is in the host's memory.
#include <stdlib.h>

#include "base/status.h"
#include "collective/hierarchy.h"
#include "collective/nccl.h"
#include "collective/shared.h"
#include "primitive/primitive.h"

// ------------------------------------------------------------------------------------------------------- allreduce

static const char *const PATH_NAMES[] = {"", "shared", "ring", "doubling", "halving", "hierarchical"};

bhvd_status allreduce_path_parse(const char *name, enum allreduce_path *path, struct bhvd_error *error)
{
    for (int i = ALLREDUCE_CHOSEN; i <= ALLREDUCE_HIERARCHICAL; i++) {
        *path = (enum allreduce_path)i;
        if (strcmp(name ? name : "", PATH_NAMES[i]) == 0)
            return BHVD_OK;
    }
    return error_set(error, BHVD_ERR_ARGUMENT, "unknown allreduce path \"%s\"; known are %s, %s, %s, %s, %s", name,
                     PATH_NAMES[1], PATH_NAMES[2], PATH_NAMES[3], PATH_NAMES[4], PATH_NAMES[5]);
}

static bool is_forced_over_links(const bhvd_context *ctx)
{
    return ctx->allreduce_path == ALLREDUCE_RING || ctx->allreduce_path == ALLREDUCE_DOUBLING ||
           ctx->allreduce_path == ALLREDUCE_HALVING;
}

// Shared memory where it is possible, two levels where there are two.
static bool use_shared(const bhvd_context *ctx, const struct process_set *set)
{
    return set->shared && !(set->size > 1 && is_forced_over_links(ctx));
}

static bool use_hierarchy(const bhvd_context *ctx, const struct process_set *set)
{
    return set->hierarchy && !is_forced_over_links(ctx);
}

static enum kernel_reduction kernel_reduction_of(bhvd_op op)
{
    switch (op) {
    case BHVD_OP_MIN: return KERNEL_MIN;
    case BHVD_OP_MAX: return KERNEL_MAX;
    case BHVD_OP_PRODUCT: return KERNEL_PRODUCT;
    default: return KERNEL_SUM;
    }
}

static struct reduction reduction_of(const bhvd_context *ctx, const struct bhvd_handle *op, bhvd_dtype dtype,
                                     int set_size)
{
    // Average is a sum, with the size taken out of the second factor (one multiplication, not two).
    double postscale = op->op == BHVD_OP_AVERAGE ? op->postscale_factor / set_size : op->postscale_factor;
    return (struct reduction){
        .dtype = dtype,
        .reduce = ctx->kernels.reduce[kernel_reduction_of(op->op)][dtype],
        .scale = ctx->kernels.scale[dtype],
        .prescale = op->prescale_factor,
        .postscale = postscale,
    };
}

// One rank: a copy, scaled twice as it would be among several.
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

// What an allreduce between hosts costs, in nanoseconds: a hop, a byte on the wire each way, a byte added (in the cache:
// these are short vectors). Measured with `python -m bagua_hvd.bench --hosts` at 10 Gbit/s, see docs/performance.md; only
// the ratios matter, and those little.
enum { HOP_NS = 27000, WIRE_PS_PER_BYTE = 900, ADD_PS_PER_BYTE = 40 };

static double cost_ns(double hops, double wire, double added)
{
    return HOP_NS * hops + (WIRE_PS_PER_BYTE * wire + ADD_PS_PER_BYTE * added) / 1000.0;
}

static enum allreduce_path cheapest_over_links(int n, size_t nbytes)
{
    int p = 1, rounds = 0;
    for (; 2 * p <= n; p *= 2)
        rounds++;
    const bool folds = p < n;
    const double N = (double)nbytes;
    double doubling = cost_ns(rounds + 2 * folds, (rounds + 2 * folds) * N, (rounds + folds) * N);
    double halving = cost_ns(2 * rounds + 2 * folds, (2.0 * (p - 1) / p + 2 * folds) * N, (1.0 * (p - 1) / p + folds) * N);
    double ring = cost_ns(2 * (n - 1), 2.0 * (n - 1) / n * N, 0);        // it adds while the wire is busy
    enum allreduce_path best = doubling <= halving ? ALLREDUCE_DOUBLING : ALLREDUCE_HALVING;
    return (doubling <= halving ? doubling : halving) <= ring ? best : ALLREDUCE_RING;
}

bhvd_status allreduce_links(bhvd_context *ctx, struct process_set *set, const struct reduction *reduction,
                            const struct span_list *list)
{
    enum allreduce_path path = is_forced_over_links(ctx) ? (enum allreduce_path)ctx->allreduce_path
                                                         : cheapest_over_links(set->size, list->nbytes);
    return path == ALLREDUCE_DOUBLING  ? allreduce_doubling(ctx, set, reduction, list)
           : path == ALLREDUCE_HALVING ? allreduce_halving(ctx, set, reduction, list)
                                       : allreduce_ring(ctx, set, reduction, list);
}

static bhvd_status allreduce_run(bhvd_context *ctx, struct process_set *set, const struct bhvd_handle *op,
                                 bhvd_dtype dtype, const struct span_list *list)
{
    struct reduction reduction = reduction_of(ctx, op, dtype, set->size);
    if (list->nbytes == 0)
        return BHVD_OK;
    if (set->size == 1)
        return allreduce_alone(&reduction, list);
    if (op->op == BHVD_OP_ADASUM)
        return allreduce_adasum(ctx, set, &reduction, list);
    if (use_shared(ctx, set))
        return allreduce_shared(ctx, set, &reduction, list);
    return use_hierarchy(ctx, set) ? allreduce_hierarchical(ctx, set, &reduction, list)
                                   : allreduce_links(ctx, set, &reduction, list);
}

// Fused operations have one dtype; within a group dtypes may differ, and each is reduced by itself.
static bhvd_status execute_allreduce(bhvd_context *ctx, struct process_set *set, const struct execution *execution,
                                     struct nccl_run *gpu)
{
    bhvd_status status = BHVD_OK;
    bool present[BHVD_DTYPE_COUNT] = {false};
    for (int i = 0; i < execution->count; i++) {
        struct bhvd_handle *op = execution->operations[i];
        for (size_t t = 0; t < op->tensor_count; t++) {
            if (operation_allocate_result(&op->tensors[t], op->tensors[t].dim0))
                return context_fail(ctx, BHVD_ERR_SYSTEM, "no memory for a result of %zu bytes", op->tensors[t].nbytes);
            present[op->tensors[t].dtype] = true;
        }
    }
    for (int dtype = 0; dtype < BHVD_DTYPE_COUNT && !status; dtype++) {
        if (!present[dtype])
            continue;
        struct span_list list = {0};
        if (gpu) {
            const struct bhvd_handle *first = execution->operations[0];
            struct reduction reduction = reduction_of(ctx, first, dtype, set->size);
            status = nccl_allreduce(gpu, execution, first->op, &reduction);
            continue;
        }
        for (int i = 0; i < execution->count && !status; i++) {
            const struct bhvd_handle *op = execution->operations[i];
            for (size_t t = 0; t < op->tensor_count && !status; t++) {
                if (op->tensors[t].dtype == (bhvd_dtype)dtype && !span_list_add(&list, &op->tensors[t]))
                    status = context_fail(ctx, BHVD_ERR_SYSTEM, "no memory for %d fused operations", execution->count);
            }
        }
        if (!status)
            status = allreduce_run(ctx, set, execution->operations[0], dtype, &list);
        span_list_fini(&list);
    }
    return status;
}

// ------------------------------------------------------------------------------------- one tensor after the other

// Rows of dim 0 that rank `index` gets of a reducescatter: the first ranks one more when it does not divide.
static int64_t rows_of(int64_t dim0, int index, int size) { return dim0 / size + (index < dim0 % size); }

static bhvd_status execute_reducescatter(bhvd_context *ctx, struct process_set *set, struct bhvd_handle *op,
                                         struct tensor *tensor, size_t *part, struct nccl_run *gpu)
{
    struct reduction reduction = reduction_of(ctx, op, tensor->dtype, set->size);
    for (int i = 0; i < set->size; i++)
        part[i] = (size_t)rows_of(tensor->dim0, i, set->size) * tensor->row_nbytes;
    if (gpu)
        return nccl_reducescatter(gpu, op, (size_t)(tensor - op->tensors),
                                  rows_of(tensor->dim0, set->rank, set->size), &reduction, part);
    if (operation_allocate_result(tensor, rows_of(tensor->dim0, set->rank, set->size)))
        return context_fail(ctx, BHVD_ERR_SYSTEM, "no memory for a result of %zu bytes", part[set->rank]);
    if (use_shared(ctx, set)) {
        struct span whole = {tensor->src, NULL, tensor->nbytes};
        return reducescatter_shared(ctx, set, &reduction, &(struct span_list){&whole, 1, 1, whole.nbytes}, tensor->dst,
                                    part);
    }
    return use_hierarchy(ctx, set) && set->hierarchy->shards == set->hierarchy->largest
               ? reducescatter_hierarchical(ctx, set, &reduction, tensor->src, tensor->dst, part)
               : reducescatter_pairwise(ctx, set, &reduction, tensor->src, tensor->dst, part);
}

static bhvd_status execute_allgather(bhvd_context *ctx, struct process_set *set, struct bhvd_handle *op,
                                     struct tensor *tensor, const int64_t *dim0, size_t *part, struct nccl_run *gpu)
{
    int64_t rows = 0;
    for (int i = 0; i < set->size; i++) {
        part[i] = (size_t)dim0[i] * tensor->row_nbytes;
        rows += dim0[i];
    }
    if (gpu)
        return nccl_allgather(gpu, op, (size_t)(tensor - op->tensors), rows, part);
    if (operation_allocate_result(tensor, rows))
        return context_fail(ctx, BHVD_ERR_SYSTEM, "no memory for a result of %zu bytes", tensor->result_nbytes);
    if (use_shared(ctx, set)) {
        struct span whole = {NULL, tensor->dst, tensor->result_nbytes};
        return allgather_shared(ctx, set, tensor->src, &(struct span_list){&whole, 1, 1, whole.nbytes}, part);
    }
    return use_hierarchy(ctx, set) ? allgather_hierarchical(ctx, set, tensor->src, tensor->dst, part)
                                   : allgather_pairwise(ctx, set, tensor->src, tensor->dst, part);
}

static bhvd_status execute_alltoall(bhvd_context *ctx, struct process_set *set, struct bhvd_handle *op,
                                    struct tensor *tensor, const int64_t *splits, int32_t *received, size_t *bytes,
                                    struct nccl_run *gpu)
{
    const int n = set->size;
    int64_t rows = 0;
    for (int i = 0; i < n * n; i++)
        bytes[i] = (size_t)splits[i] * tensor->row_nbytes;
    for (int i = 0; i < n; i++) {
        received[i] = (int32_t)splits[i * n + set->rank];
        rows += splits[i * n + set->rank];
    }
    if (gpu)
        return nccl_alltoall(gpu, op, (size_t)(tensor - op->tensors), rows, bytes);
    if (operation_allocate_result(tensor, rows))
        return context_fail(ctx, BHVD_ERR_SYSTEM, "no memory for a result of %zu bytes", tensor->result_nbytes);
    return use_shared(ctx, set) ? alltoall_shared(ctx, set, tensor->src, tensor->dst, bytes)
                                : alltoall_pairwise(ctx, set, tensor->src, tensor->dst, bytes);
}

// Whether every host has a member with the local index of this one.
static bool is_on_every_host(const struct hierarchy *h, int position)
{
    int host, index;
    hierarchy_find(h, position, &host, &index);
    return index < h->shards;
}

static bhvd_status execute_broadcast(bhvd_context *ctx, struct process_set *set, struct bhvd_handle *op,
                                     struct tensor *tensor, struct nccl_run *gpu)
{
    int root = process_set_index(set, op->root_rank);
    if (gpu)
        return nccl_broadcast(gpu, op, (size_t)(tensor - op->tensors), root);
    if (operation_allocate_result(tensor, tensor->dim0))
        return context_fail(ctx, BHVD_ERR_SYSTEM, "no memory for a result of %zu bytes", tensor->nbytes);
    if (use_shared(ctx, set))
        return broadcast_shared(ctx, set, root, tensor->src, tensor->dst, tensor->nbytes);
    return use_hierarchy(ctx, set) && is_on_every_host(set->hierarchy, root)
               ? broadcast_hierarchical(ctx, set, root, tensor->src, tensor->dst, tensor->nbytes)
               : broadcast_tree(ctx, set, root, tensor->src, tensor->dst, tensor->nbytes, NULL);
}

static bhvd_status execute_tensors(bhvd_context *ctx, struct process_set *set, struct bhvd_handle *op,
                                   struct nccl_run *gpu)
{
    const size_t n = (size_t)set->size;
    size_t per_tensor = op->kind == BHVD_ALLGATHER ? n : op->kind == BHVD_ALLTOALL ? n * n : 0;
    size_t *bytes = malloc(n * n * sizeof *bytes);
    if (op->kind == BHVD_ALLTOALL)
        op->received_splits = malloc(op->tensor_count * n * sizeof *op->received_splits);
    op->received_size = n;
    bhvd_status status = BHVD_OK;
    if (!bytes || (op->kind == BHVD_ALLTOALL && !op->received_splits))
        status = context_fail(ctx, BHVD_ERR_SYSTEM, "no memory for a collective of %d ranks", set->size);
    else if (op->agreed_count != per_tensor * op->tensor_count)
        status = context_fail(ctx, BHVD_ERR_SYSTEM, "the coordinator's answer about '%.*s' does not fit it",
                              (int)op->name_size, op->name);
    for (size_t t = 0; t < op->tensor_count && !status; t++) {
        struct tensor *tensor = &op->tensors[t];
        const int64_t *agreed = op->agreed + t * per_tensor;
        if (op->kind == BHVD_ALLGATHER)
            status = execute_allgather(ctx, set, op, tensor, agreed, bytes, gpu);
        else if (op->kind == BHVD_ALLTOALL)
            status = execute_alltoall(ctx, set, op, tensor, agreed, op->received_splits + t * n, bytes, gpu);
        else if (op->kind == BHVD_REDUCESCATTER)
            status = execute_reducescatter(ctx, set, op, tensor, bytes, gpu);
        else
            status = execute_broadcast(ctx, set, op, tensor, gpu);
    }
    free(bytes);
    return status;
}

// ----------------------------------------------------------------------------------------------------- process sets

static bhvd_status execute_process_set_add(bhvd_context *ctx, struct bhvd_handle *op, struct bhvd_error *error)
{
    int id = -1;
    bhvd_status status = BHVD_OK;
    for (size_t i = 0; i < op->split_count && !status; i++) {
        if (op->splits[i] < 0 || op->splits[i] >= ctx->options.size || (i && op->splits[i] == op->splits[i - 1]))
            status = error_set(error, BHVD_ERR_ARGUMENT, "a process set needs different ranks from 0 to %d, not %d",
                               ctx->options.size - 1, op->splits[i]);
    }
    pthread_mutex_lock(&ctx->sets_lock);
    if (!status)
        status = process_set_add(ctx, op->splits, (int)op->split_count, &id, error);
    pthread_mutex_unlock(&ctx->sets_lock);
    op->value = id;
    bhvd_status added = coordinator_set_added(ctx);
    return status ? status : added;
}

static bhvd_status execute_process_set_remove(bhvd_context *ctx, struct bhvd_handle *op, struct bhvd_error *error)
{
    int id = op->root_rank;
    op->value = id > 0 && process_set_get(&ctx->sets, (uint32_t)id) != NULL;
    if (!op->value)
        return BHVD_OK;
    struct process_set *set = process_set_get(&ctx->sets, (uint32_t)id);
    const uint32_t number = set->number;
    bhvd_status status = BHVD_OK;
    // Its area may be given to another set: not before all members have read what lies there. While this rank waits for
    // them it still announces operations on the set, so those are ended afterwards.
    if (set->shared && set->size > 1)
        status = shared_barrier(ctx, set);
    else if (set->hierarchy)
        status = shared_barrier(ctx, set->hierarchy->local);
    if (!status)
        status = coordinator_set_removed(ctx, number);
    nccl_close(ctx, set);
    pthread_mutex_lock(&ctx->sets_lock);
    process_set_remove(ctx, (uint32_t)id);
    pthread_mutex_unlock(&ctx->sets_lock);
    operation_end_set(ctx, number);
    (void)error;
    return status;
}

// By NCCL, in one level or two, where a set has agreed on it and it takes such an operation; else in the host's memory, *gpu NULL.
static bhvd_status begin(bhvd_context *ctx, struct process_set *set, const struct execution *execution, struct nccl_run **gpu)
{
    const struct bhvd_handle *op = execution->operations[0];
    bhvd_status status = BHVD_OK;
    *gpu = NULL;
    if (op->on_gpu && !set->nccl)
        status = nccl_agree(ctx, set, op);
    const struct nccl_facts facts = nccl_facts_of(set);
    const bool has_levels = primitive_has_levels(set, op->kind, op->hierarchical);
    const enum nccl_way way = op->on_gpu ? nccl_way_of(&facts, op, has_levels) : WAY_HOST;
    return status || way == WAY_HOST ? status : nccl_begin(ctx, set, way, execution, gpu);
}

static bhvd_status execute_d_lp_s(bhvd_context *ctx, struct process_set *set, const struct execution *execution,
                                  struct bhvd_error *error)
{
    struct nccl_run *gpu;
    bhvd_status status = begin(ctx, set, execution, &gpu);
    if (!status)
        status = gpu ? nccl_d_lp_s(gpu, execution->operations[0]) : d_lp_s(ctx, set, execution->operations[0], error);
    return nccl_end(gpu, status);
}

static bhvd_status execute_collective(bhvd_context *ctx, struct process_set *set, const struct execution *execution)
{
    struct bhvd_handle *op = execution->operations[0];
    struct nccl_run *gpu;
    bhvd_status status = begin(ctx, set, execution, &gpu);
    if (!status)
        status = op->kind == BHVD_ALLREDUCE ? execute_allreduce(ctx, set, execution, gpu)
                 : op->kind != BHVD_C_LP_S  ? execute_tensors(ctx, set, op, gpu)
                 : gpu                      ? nccl_c_lp_s(gpu, op)
                                            : c_lp_s(ctx, set, op);
    return nccl_end(gpu, status);
}

bhvd_status collective_execute(bhvd_context *ctx, const struct execution *execution, struct bhvd_error *error)
{
    struct process_set *set = process_set_find(&ctx->sets, execution->process_set);
    struct bhvd_handle *op = execution->operations[0];
    if (!set || set->rank < 0)
        return error_set(error, BHVD_ERR_UNSUPPORTED, "the process set was removed while '%.*s' was in flight",
                         (int)op->name_size, op->name);
    switch (op->kind) {
    case BHVD_D_FP_S:
        return d_fp_s(ctx, set, op, error);
    case BHVD_D_LP_S:
        return execute_d_lp_s(ctx, set, execution, error);
    case BHVD_BARRIER:
        return BHVD_OK;
    case BHVD_JOIN:
        op->value = op->agreed_count ? op->agreed[0] : -1;
        return BHVD_OK;
    case BHVD_PROCESS_SET_ADD:
        return execute_process_set_add(ctx, op, error);
    case BHVD_PROCESS_SET_REMOVE:
        return execute_process_set_remove(ctx, op, error);
    default:
        return execute_collective(ctx, set, execution);
    }
}
