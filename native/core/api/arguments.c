#include "core/api/api.h"

#include "base/dtype.h"
#include "base/status.h"
#include "device/device.h"

static bhvd_status check_process_set(bhvd_context *ctx, const struct bhvd_args *args, struct set_facts *facts,
                                     struct bhvd_error *error)
{
    bhvd_status status = BHVD_OK;
    const char *word = OPERATION_TRAITS[args->kind].word;
    pthread_mutex_lock(&ctx->sets_lock);
    const struct process_set *set = process_set_get(&ctx->sets, args->process_set);
    if (!set) {
        status = error_set(error, BHVD_ERR_ARGUMENT,
                           "%s: Process set provided does not exist, or has not been registered.", word);
    } else if (set->group.rank < 0) {
        status = error_set(error, BHVD_ERR_ARGUMENT, "%s: Rank %d is not a member of the provided process set.", word,
                           ctx->options.rank);
    } else {
        *facts = (struct set_facts){set->group.size, set->group.rank, set->number,
                                    nccl_facts_of(set->nccl, &set->group, args->kind, args->hierarchical != 0)};
        if (args->kind == BHVD_BROADCAST && process_set_index(set, args->root_rank) < 0)
            status = error_set(error, BHVD_ERR_ARGUMENT,
                               "broadcast received invalid root rank %d for provided process set", args->root_rank);
    }
    pthread_mutex_unlock(&ctx->sets_lock);
    return status;
}

static bhvd_status check_splits(const struct bhvd_args *args, int set_size, struct bhvd_error *error)
{
    if (args->split_count != (args->splits ? (size_t)set_size : 0))
        return error_set(error, BHVD_ERR_ARGUMENT,
                         "Number of entries in splits tensor (%zu) must equal the number of ranks in the set (%d).",
                         args->split_count, set_size);
    for (size_t t = 0; t < args->tensor_count; t++) {
        const struct bhvd_tensor *tensor = &args->tensors[t];
        if (tensor->ndim == 0)
            continue;                   // the coordinator refuses it, on all ranks
        int64_t sum = 0;
        for (size_t i = 0; i < args->split_count; i++) {
            if (args->splits[i] < 0)
                return error_set(error, BHVD_ERR_ARGUMENT, "splits[%zu] is negative: %d.", i, args->splits[i]);
            sum += args->splits[i];
        }
        if (args->splits && sum > tensor->shape[0])
            return error_set(error, BHVD_ERR_ARGUMENT,
                             "Sum of splits entries (%lld) is greater than the first dimension of tensor (%lld).",
                             (long long)sum, (long long)tensor->shape[0]);
        if (!args->splits && tensor->shape[0] % set_size)
            return error_set(error, BHVD_ERR_ARGUMENT,
                             "splits not provided, but first dimension of tensor (%lld) is not an even multiple of "
                             "the number of ranks (%d).",
                             (long long)tensor->shape[0], set_size);
        if (!args->splits && tensor->shape[0] / set_size > INT32_MAX)
            return error_set(error, BHVD_ERR_ARGUMENT, "alltoall of %lld rows to each rank: at most %d are possible",
                             (long long)(tensor->shape[0] / set_size), INT32_MAX);
    }
    return BHVD_OK;
}

static bool is_empty(const struct bhvd_tensor *tensor)
{
    bool empty = false;
    for (int d = 0; d < tensor->ndim; d++)
        empty |= tensor->shape[d] == 0;
    return empty;
}

static bhvd_status check_tensors(const struct bhvd_args *args, struct bhvd_error *error)
{
    if (OPERATION_TRAITS[args->kind].has_tensors != (args->tensor_count > 0))
        return error_set(error, BHVD_ERR_ARGUMENT, "%s '%s' takes %s, but was given %zu", OPERATION_TRAITS[args->kind].word,
                         args->name, OPERATION_TRAITS[args->kind].has_tensors ? "at least one tensor" : "no tensors",
                         args->tensor_count);
    if (args->tensor_count > REQUEST_TENSORS_MAX || (args->tensor_count && !args->tensors))
        return error_set(error, BHVD_ERR_ARGUMENT, "'%s' was given %zu tensors%s", args->name, args->tensor_count,
                         args->tensors ? ": post several groups" : " but no pointer to them");
    for (size_t t = 0; t < args->tensor_count; t++) {
        const struct bhvd_tensor *tensor = &args->tensors[t];
        if (tensor->dtype < 0 || tensor->dtype >= BHVD_DTYPE_COUNT)
            return error_set(error, BHVD_ERR_ARGUMENT, "unknown dtype %d (tensor %zu of '%s')", tensor->dtype, t,
                             args->name);
        if (tensor->ndim < 0 || tensor->ndim > REQUEST_NDIM_MAX)
            return error_set(error, BHVD_ERR_ARGUMENT, "tensor %zu of '%s' has %d dimensions, at most %d are possible",
                             t, args->name, tensor->ndim, REQUEST_NDIM_MAX);
        int64_t count = 1;
        for (int d = 0; d < tensor->ndim && count >= 0; d++)
            count = operation_count(count, tensor->shape[d]);
        if (count < 0)
            return error_set(error, BHVD_ERR_ARGUMENT, "tensor %zu of '%s' has a negative dimension or too many elements", t,
                             args->name);
        count = is_empty(tensor) ? 0 : count;
        if (count && !tensor->src)
            return error_set(error, BHVD_ERR_ARGUMENT, "tensor %zu of '%s' has elements but no memory", t, args->name);
        bool reshapes = args->kind == BHVD_ALLGATHER || args->kind == BHVD_ALLTOALL || args->kind == BHVD_REDUCESCATTER;
        if (count && reshapes && tensor->dst == tensor->src)
            return error_set(error, BHVD_ERR_ARGUMENT, "%s cannot be done in place (tensor %zu of '%s')",
                             OPERATION_TRAITS[args->kind].word, t, args->name);
        if (args->kind == BHVD_REDUCESCATTER && tensor->ndim == 0)
            return error_set(error, BHVD_ERR_ARGUMENT, "Reducescatter of a rank-zero tensor is not possible ('%s').",
                             args->name);
        if ((args->kind == BHVD_C_LP_S || args->kind == BHVD_D_LP_S) &&
            !bhvd_encoded_size(args->codec, tensor->dtype, 1, &args->codec_options))
            return error_set(error, BHVD_ERR_ARGUMENT,
                             "codec %d with parameter %g does not take dtype %s (tensor %zu of '%s')", args->codec,
                             args->codec_options.parameter, bhvd_dtype_name(tensor->dtype), t, args->name);
        if (args->kind == BHVD_D_FP_S && !dtype_is_floating(tensor->dtype))
            return error_set(error, BHVD_ERR_ARGUMENT, "%s does not take dtype %s (tensor %zu of '%s')",
                             OPERATION_TRAITS[args->kind].word, bhvd_dtype_name(tensor->dtype), t, args->name);
        if (OPERATION_TRAITS[args->kind].has_one_dtype && tensor->dtype != args->tensors[0].dtype)
            return error_set(error, BHVD_ERR_ARGUMENT, "the tensors of '%s' must have one dtype", args->name);
    }
    return BHVD_OK;
}

static bhvd_status check_adasum(const struct bhvd_args *args, int set_size, struct bhvd_error *error)
{
    if (set_size & (set_size - 1))
        return error_set(error, BHVD_ERR_UNSUPPORTED, "Adasum needs a power of two of ranks, not %d.", set_size);
    for (size_t t = 0; t < args->tensor_count; t++) {
        int dtype = args->tensors[t].dtype;
        if (!dtype_is_floating(dtype))
            return error_set(error, BHVD_ERR_ARGUMENT, "Adasum does not take dtype %s (tensor %zu of '%s')",
                             bhvd_dtype_name(dtype), t, args->name);
    }
    return BHVD_OK;
}

static bhvd_status check_decentralized(const struct bhvd_args *args, struct bhvd_error *error)
{
    if (args->round < 0)
        return error_set(error, BHVD_ERR_ARGUMENT, "round %d is negative: rounds count from 0 ('%s')", args->round,
                         args->name);
    if (args->prescale_factor != 1.0 || args->postscale_factor != 1.0)
        return error_set(error, BHVD_ERR_ARGUMENT, "%s takes no prescale or postscale factor ('%s')",
                         OPERATION_TRAITS[args->kind].word, args->name);
    return BHVD_OK;
}

static bhvd_status check_replicas(const struct bhvd_args *args, struct bhvd_error *error)
{
    static const char *const names[REPLICAS] = {"own", "left", "right"};
    bool has_result = false;
    for (int r = 0; r < REPLICAS; r++) {
        if (!args->replicas[r] && (args->before[r] != 0 || args->after[1 + r] != 0))
            return error_set(error, BHVD_ERR_ARGUMENT, "'%s' has a weight for the %s replica, which is not kept", args->name,
                             names[r]);
        if (args->gpu && args->replicas[r] && !args->replica_copies[r])
            return error_set(error, BHVD_ERR_ARGUMENT, "'%s' is on device %d and keeps replicas: give device copies of them",
                             args->name, args->device);
        has_result |= args->after[1 + r] != 0;
    }
    for (size_t t = 0; t < args->tensor_count && has_result; t++) {
        if (!is_empty(&args->tensors[t]) && (!args->tensors[t].dst || args->tensors[t].dst_on_host))
            return error_set(error, BHVD_ERR_ARGUMENT, "the results of '%s' need memory where its values are", args->name);
    }
    return BHVD_OK;
}

// Checks the ranks of a process set, which are passed as splits (check_splits: those of alltoall). Other kinds have none.
static bhvd_status check_ranks(const bhvd_context *ctx, const struct bhvd_args *args, struct bhvd_error *error)
{
    const int size = ctx->options.size;
    if (args->kind == BHVD_ALLTOALL)
        return BHVD_OK;
    if (args->kind != BHVD_PROCESS_SET_ADD)
        return !args->splits && !args->split_count
                   ? BHVD_OK
                   : error_set(error, BHVD_ERR_ARGUMENT, "%s takes no splits ('%s')", OPERATION_TRAITS[args->kind].word,
                               args->name);
    if (!args->splits || args->split_count == 0)
        return error_set(error, BHVD_ERR_ARGUMENT, "a process set needs at least one rank");
    if (args->split_count > (size_t)size)
        return error_set(error, BHVD_ERR_ARGUMENT, "a process set of %zu ranks, but the job has %d", args->split_count, size);
    bool is_member = false;
    for (size_t i = 0; i < args->split_count; i++) {
        bool is_again = false;
        is_member |= args->splits[i] == ctx->options.rank;
        for (size_t j = 0; j < i; j++)
            is_again |= args->splits[j] == args->splits[i];
        if (args->splits[i] < 0 || args->splits[i] >= size || is_again)
            return error_set(error, BHVD_ERR_ARGUMENT, "a process set holds ranks from 0 to %d, each at most once; rank %d is out "
                             "of range or repeated", size - 1, args->splits[i]);
    }
    if (args->root_rank && !is_member)
        return error_set(error, BHVD_ERR_ARGUMENT, "rank %d requests a process set of which it is not a member ('%s')",
                         ctx->options.rank, args->name);
    return BHVD_OK;
}

bhvd_status arguments_check(bhvd_context *ctx, const struct bhvd_args *args, struct set_facts *facts,
                            struct bhvd_error *error)
{
    if (args->kind < 0 || args->kind >= OPERATION_KINDS)
        return error_set(error, BHVD_ERR_ARGUMENT, "unknown kind of operation %d", args->kind);
    if (!args->name || strlen(args->name) > REQUEST_NAME_MAX)
        return error_set(error, BHVD_ERR_ARGUMENT, "an operation needs a name of at most %d bytes", REQUEST_NAME_MAX);
    if (ctx->awaits_state)
        return error_set(error, BHVD_ERR_ARGUMENT, "%s '%s': this process has joined a running elastic job, and its state is not "
                         "yet synchronized: call collectives only in a function decorated with hvd.elastic.run, and leave out "
                         "hvd.broadcast_parameters and the like, since the state gives all ranks the same values",
                         OPERATION_TRAITS[args->kind].word, args->name);
    if (args->op < BHVD_OP_AVERAGE || args->op > BHVD_OP_PRODUCT)
        return error_set(error, BHVD_ERR_ARGUMENT, "unknown reduction op %d ('%s')", args->op, args->name);
    if (args->kind == BHVD_REDUCESCATTER && args->op > BHVD_OP_SUM)
        return error_set(error, BHVD_ERR_UNSUPPORTED, "Reducescatter currently only supports AVERAGE and SUM.");
    if (args->kind == BHVD_C_LP_S && args->op > BHVD_OP_SUM)
        return error_set(error, BHVD_ERR_UNSUPPORTED, "Low-precision allreduce only supports AVERAGE and SUM.");
    // For every kind, since every kind carries these.
    if (args->codec < BHVD_CODEC_NONE || args->codec >= BHVD_CODEC_COUNT)
        return error_set(error, BHVD_ERR_ARGUMENT, "unknown codec %d ('%s')", args->codec, args->name);
    if (args->byte_counter < 0 || args->byte_counter >= BHVD_BYTE_COUNTERS)
        return error_set(error, BHVD_ERR_ARGUMENT, "byte counter %d is not one of 0 to %d ('%s')", args->byte_counter,
                         BHVD_BYTE_COUNTERS - 1, args->name);
    if (args->exchange < BHVD_EXCHANGE_SCATTER_GATHER || args->exchange > BHVD_EXCHANGE_ALLGATHER)
        return error_set(error, BHVD_ERR_ARGUMENT, "unknown exchange %d ('%s')", args->exchange, args->name);
    if (args->topology < BHVD_TOPOLOGY_SHIFT_ONE || args->topology > BHVD_TOPOLOGY_ROUND_ROBIN)
        return error_set(error, BHVD_ERR_ARGUMENT, "unknown topology %d ('%s')", args->topology, args->name);
    if (args->device >= 0 ? !args->gpu || args->gpu->index != args->device : args->gpu != NULL)
        return error_set(error, BHVD_ERR_ARGUMENT, "'%s' is on device %d, but was given %s", args->name, args->device,
                         args->gpu ? "another GPU" : "no GPU");
    if (args->gpu && ((args->worker_residual && !args->worker_copy) || (args->server_residual && !args->server_copy)))
        return error_set(error, BHVD_ERR_ARGUMENT, "'%s' is on device %d and uses error feedback: give device copies of the error "
                         "states", args->name, args->device);
    if (OPERATION_TRAITS[args->kind].is_of_all && args->process_set != 0)
        return error_set(error, BHVD_ERR_ARGUMENT, "%s runs over all ranks, not over process set %d",
                         OPERATION_TRAITS[args->kind].word, args->process_set);
    bhvd_status status = check_tensors(args, error);
    if (!status)
        status = check_ranks(ctx, args, error);
    if (!status)
        status = check_process_set(ctx, args, facts, error);
    if (!status && args->kind == BHVD_ALLTOALL)
        status = check_splits(args, facts->size, error);
    if (!status && (args->kind == BHVD_D_FP_S || args->kind == BHVD_D_LP_S))
        status = check_decentralized(args, error);
    if (!status && args->kind == BHVD_D_LP_S)
        status = check_replicas(args, error);
    if (!status && args->kind == BHVD_ALLREDUCE && args->op == BHVD_OP_ADASUM)
        status = check_adasum(args, facts->size, error);
    return status;
}
