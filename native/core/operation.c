#include "core/operation.h"

#include <stdlib.h>

#include "base/clock.h"
#include "base/dtype.h"
#include "base/futex.h"
#include "base/pages.h"
#include "base/status.h"
#include "collective/nccl.h"
#include "core/context.h"
#include "core/progress.h"
#include "core/request.h"
#include "core/result_memory.h"
#include "device/buffer.h"
#include "device/mirror.h"
#include "device/staging.h"
#include "primitive/staged_codes.h"

static const struct {
    const char *name, *word;
} KINDS[] = {
    [BHVD_ALLREDUCE] = {"ALLREDUCE", "Allreduce"},
    [BHVD_ALLGATHER] = {"ALLGATHER", "Allgather"},
    [BHVD_BROADCAST] = {"BROADCAST", "Broadcast"},
    [BHVD_ALLTOALL] = {"ALLTOALL", "Alltoall"},
    [BHVD_REDUCESCATTER] = {"REDUCESCATTER", "Reducescatter"},
    [BHVD_BARRIER] = {"BARRIER", "Barrier"},
    [BHVD_JOIN] = {"JOIN", "Join"},
    [BHVD_C_LP_S] = {"C_LP_S", "Low-precision allreduce"},
    [BHVD_D_FP_S] = {"D_FP_S", "Decentralized averaging"},
    [BHVD_D_LP_S] = {"D_LP_S", "Decentralized low-precision exchange"},
    [BHVD_PROCESS_SET_ADD] = {"PROCESS_SET_ADD", "Process set addition"},
    [BHVD_PROCESS_SET_REMOVE] = {"PROCESS_SET_REMOVE", "Process set removal"},
};
enum { KIND_COUNT = sizeof KINDS / sizeof KINDS[0] };

const char *operation_kind_name(bhvd_kind kind, bhvd_op op)
{
    return kind == BHVD_ALLREDUCE && op == BHVD_OP_ADASUM ? "ADASUM" : KINDS[kind].name;
}

const char *operation_kind_word(bhvd_kind kind) { return KINDS[kind].word; }

uint64_t operation_hash(const struct operation_key *key)
{
    return table_hash(key->name, key->name_size, key->process_set);
}

static bool operation_has_key(const struct table_node *node, const void *arg)
{
    const struct bhvd_handle *operation = TABLE_CONTAINER(node, struct bhvd_handle, by_name);
    const struct operation_key *key = arg;
    return operation->process_set == key->process_set && operation->name_size == key->name_size &&
           memcmp(operation->name, key->name, key->name_size) == 0;
}

struct bhvd_handle *operation_find(bhvd_context *ctx, const struct operation_key *key)
{
    pthread_mutex_lock(&ctx->post_lock);
    struct table_node *node = table_find(&ctx->names, operation_hash(key), operation_has_key, key);
    pthread_mutex_unlock(&ctx->post_lock);
    return node ? TABLE_CONTAINER(node, struct bhvd_handle, by_name) : NULL;
}

bool operation_needs_tensors(bhvd_kind kind)
{
    return kind <= BHVD_REDUCESCATTER || (kind >= BHVD_C_LP_S && kind <= BHVD_D_LP_S);
}

struct set_facts {
    int size, rank;
    bool has_levels;
    uint32_t number;
    struct nccl_facts nccl;
};

static bhvd_status check_process_set(bhvd_context *ctx, const struct bhvd_args *args, struct set_facts *facts,
                                     struct bhvd_error *error)
{
    bhvd_status status = BHVD_OK;
    const char *word = operation_kind_word(args->kind);
    pthread_mutex_lock(&ctx->sets_lock);
    const struct process_set *set = process_set_get(&ctx->sets, args->process_set);
    if (!set) {
        status = error_set(error, BHVD_ERR_ARGUMENT,
                           "%s: Process set provided does not exist, or has not been registered.", word);
    } else if (set->rank < 0) {
        status = error_set(error, BHVD_ERR_ARGUMENT, "%s: Rank %d is not a member of the provided process set.", word,
                           ctx->options.rank);
    } else {
        *facts = (struct set_facts){set->size, set->rank, set->hierarchy != NULL, set->number, nccl_facts_of(set)};
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
            continue;                   // refused by the coordinator, on all ranks
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

static bhvd_status check_tensors(const struct bhvd_args *args, struct bhvd_error *error)
{
    if (operation_needs_tensors(args->kind) != (args->tensor_count > 0))
        return error_set(error, BHVD_ERR_ARGUMENT, "%s '%s' was given %zu tensors", operation_kind_word(args->kind),
                         args->name, args->tensor_count);
    for (size_t t = 0; t < args->tensor_count; t++) {
        const struct bhvd_tensor *tensor = &args->tensors[t];
        if (tensor->dtype < 0 || tensor->dtype >= BHVD_DTYPE_COUNT)
            return error_set(error, BHVD_ERR_ARGUMENT, "unknown dtype %d (tensor %zu of '%s')", tensor->dtype, t,
                             args->name);
        if (tensor->ndim < 0 || tensor->ndim > REQUEST_NDIM_MAX)
            return error_set(error, BHVD_ERR_ARGUMENT, "tensor %zu of '%s' has %d dimensions, at most %d are possible",
                             t, args->name, tensor->ndim, REQUEST_NDIM_MAX);
        int64_t count = 1;
        for (int d = 0; d < tensor->ndim; d++) {
            if (tensor->shape[d] < 0 || __builtin_mul_overflow(count, tensor->shape[d], &count) || count > OPERATION_COUNT_MAX)
                return error_set(error, BHVD_ERR_ARGUMENT, "tensor %zu of '%s' has an impossible shape", t, args->name);
        }
        if (count && !tensor->src)
            return error_set(error, BHVD_ERR_ARGUMENT, "tensor %zu of '%s' has elements but no memory", t, args->name);
        bool reshapes = args->kind == BHVD_ALLGATHER || args->kind == BHVD_ALLTOALL || args->kind == BHVD_REDUCESCATTER;
        if (count && reshapes && tensor->dst == tensor->src)
            return error_set(error, BHVD_ERR_ARGUMENT, "%s cannot be done in place (tensor %zu of '%s')",
                             operation_kind_word(args->kind), t, args->name);
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
                             operation_kind_word(args->kind), bhvd_dtype_name(tensor->dtype), t, args->name);
        if (args->kind >= BHVD_C_LP_S && tensor->dtype != args->tensors[0].dtype)
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
    if (args->topology < BHVD_TOPOLOGY_SHIFT_ONE || args->topology > BHVD_TOPOLOGY_RING)
        return error_set(error, BHVD_ERR_ARGUMENT, "unknown topology %d ('%s')", args->topology, args->name);
    if (args->round < 0)
        return error_set(error, BHVD_ERR_ARGUMENT, "round %d is negative: rounds count from 0 ('%s')", args->round,
                         args->name);
    if (args->prescale_factor != 1.0 || args->postscale_factor != 1.0)
        return error_set(error, BHVD_ERR_ARGUMENT, "%s takes no prescale or postscale factor ('%s')",
                         operation_kind_word(args->kind), args->name);
    return BHVD_OK;
}

static bhvd_status check_args(bhvd_context *ctx, const struct bhvd_args *args, struct set_facts *facts,
                              struct bhvd_error *error)
{
    if (args->kind < 0 || args->kind >= KIND_COUNT)
        return error_set(error, BHVD_ERR_ARGUMENT, "unknown kind of operation %d", args->kind);
    if (!args->name || strlen(args->name) > REQUEST_NAME_MAX)
        return error_set(error, BHVD_ERR_ARGUMENT, "an operation needs a name of at most %d bytes", REQUEST_NAME_MAX);
    if (args->op < BHVD_OP_AVERAGE || args->op > BHVD_OP_PRODUCT)
        return error_set(error, BHVD_ERR_ARGUMENT, "unknown reduction op %d ('%s')", args->op, args->name);
    if (args->kind == BHVD_REDUCESCATTER && args->op > BHVD_OP_SUM)
        return error_set(error, BHVD_ERR_UNSUPPORTED, "Reducescatter currently only supports AVERAGE and SUM.");
    if (args->kind == BHVD_C_LP_S && args->op > BHVD_OP_SUM)
        return error_set(error, BHVD_ERR_UNSUPPORTED, "Low-precision allreduce only supports AVERAGE and SUM.");
    if (args->exchange < BHVD_EXCHANGE_SCATTER_GATHER || args->exchange > BHVD_EXCHANGE_ALLGATHER)
        return error_set(error, BHVD_ERR_ARGUMENT, "unknown exchange %d ('%s')", args->exchange, args->name);
    if (args->device >= 0 ? !args->gpu || args->gpu->index != args->device : args->gpu != NULL)
        return error_set(error, BHVD_ERR_ARGUMENT, "'%s' is on device %d, but was given %s", args->name, args->device,
                         args->gpu ? "another GPU" : "no GPU");
    if (args->gpu && ((args->worker_error && !args->worker_mirror) || (args->server_error && !args->server_mirror)))
        return error_set(error, BHVD_ERR_ARGUMENT, "'%s' is on device %d and feeds errors back: give mirrors of them",
                         args->name, args->device);
    bool for_all = args->kind == BHVD_JOIN || args->kind >= BHVD_PROCESS_SET_ADD;
    if (for_all && args->process_set != 0)
        return error_set(error, BHVD_ERR_ARGUMENT, "%s takes part on all ranks, not on process set %d",
                         operation_kind_word(args->kind), args->process_set);
    if (args->kind == BHVD_PROCESS_SET_ADD && (!args->splits || args->split_count == 0))
        return error_set(error, BHVD_ERR_ARGUMENT, "a process set needs at least one rank");
    bhvd_status status = check_tensors(args, error);
    if (!status)
        status = check_process_set(ctx, args, facts, error);
    if (!status && args->kind == BHVD_ALLTOALL)
        status = check_splits(args, facts->size, error);
    if (!status && (args->kind == BHVD_D_FP_S || args->kind == BHVD_D_LP_S))
        status = check_decentralized(args, error);
    if (!status && args->kind == BHVD_ALLREDUCE && args->op == BHVD_OP_ADASUM)
        status = check_adasum(args, facts->size, error);
    return status;
}

static void tensor_init(struct tensor *out, const struct bhvd_tensor *in)
{
    size_t row = 1;
    for (int d = 1; d < in->ndim; d++)
        row *= (size_t)in->shape[d];
    int64_t dim0 = in->ndim ? in->shape[0] : 1;
    size_t element = bhvd_dtype_size(in->dtype);
    *out = (struct tensor){
        .src = in->src,
        .dst = in->dst,
        .count = row * (size_t)dim0,
        .nbytes = row * (size_t)dim0 * element,
        .dim0 = dim0,
        .row_nbytes = row * element,
        .dtype = in->dtype,
    };
}

static int compare_ranks(const void *a, const void *b) { return *(const int32_t *)a - *(const int32_t *)b; }

// The ranks of a process set in rising order, so that all ranks say the same.
static int32_t *copy_splits(const struct bhvd_args *args)
{
    if (args->split_count == 0)
        return NULL;
    int32_t *splits = malloc(args->split_count * sizeof *splits);
    if (splits) {
        memcpy(splits, args->splits, args->split_count * sizeof *splits);
        if (args->kind == BHVD_PROCESS_SET_ADD)
            qsort(splits, args->split_count, sizeof *splits, compare_ranks);
    }
    return splits;
}

// To where the execution wants the tensors, and the errors to be fed back.
static bhvd_status stage(struct bhvd_handle *op, const struct bhvd_args *args, const struct set_facts *facts,
                         struct bhvd_error *error)
{
    const enum nccl_way way = args->gpu ? nccl_way_of(&facts->nccl, op) : WAY_HOST;
    if (way == WAY_HOST && staged_codes_take(op, args, op->hierarchical && facts->has_levels))
        return staged_codes_create(op, args, facts->size, facts->rank, error);
    if (way == WAY_HOST && op->worker_mirror && bhvd_mirror_fetch(op->worker_mirror, error))
        return error->status;
    if (!args->gpu)
        return BHVD_OK;
    bhvd_status status = staging_create(op, args, facts->size, op->ctx->options.rank, way != WAY_HOST, error);
    if (!status)
        op->staging->host_waits = way == WAY_LEVELS;
    return status;
}

bhvd_status operation_create(bhvd_context *ctx, const struct bhvd_args *args, struct bhvd_handle **out,
                             struct bhvd_error *error)
{
    struct set_facts facts = {0};
    bhvd_status status = check_args(ctx, args, &facts, error);
    if (status)
        return status;
    struct bhvd_args changed = *args;
    args = &changed;
    if (args->kind == BHVD_JOIN)
        changed.name = JOIN_NAME;               // ranks join after different numbers of operations
    struct bhvd_handle *op = calloc(1, sizeof *op + args->tensor_count * sizeof op->tensors[0]);
    int32_t *splits = copy_splits(args);
    if (!op || (args->split_count && !splits)) {
        free(op);
        free(splits);
        return error_set(error, BHVD_ERR_SYSTEM, "no memory for operation '%s'", args->name);
    }
    changed.splits = op->splits = splits;
    op->split_count = args->split_count;
    atomic_init(&op->references, 2);            // the caller's handle, and the engine
    atomic_init(&op->done, 0);
    op->ctx = ctx;
    op->kind = args->kind;
    op->process_set = facts.number;
    op->op = args->op;
    op->root_rank = args->root_rank;
    op->prescale_factor = args->prescale_factor;
    op->postscale_factor = args->postscale_factor;
    op->codec = args->codec;
    op->codec_options = args->codec_options;
    op->exchange = args->exchange;
    op->topology = args->topology;
    op->round = args->round;
    op->hierarchical = args->hierarchical != 0;
    op->on_gpu = args->gpu != NULL;
    memcpy(op->replicas, args->replicas, sizeof op->replicas);
    op->worker_error = args->worker_error;
    op->server_error = args->server_error;
    op->worker_mirror = args->worker_error ? args->worker_mirror : NULL;
    op->server_mirror = args->server_error ? args->server_mirror : NULL;
    op->tensor_count = args->tensor_count;
    for (size_t t = 0; t < args->tensor_count; t++) {
        tensor_init(&op->tensors[t], &args->tensors[t]);
        if (!args->gpu && op->tensors[t].dst != op->tensors[t].src)
            pages_prefer_huge(op->tensors[t].dst, op->tensors[t].nbytes);
    }
    request_write(&op->request, facts.number, args);
    op->name_size = (uint16_t)strlen(args->name);
    op->name = (const char *)op->request.data + sizeof(uint32_t) + sizeof(uint16_t);
    if (op->request.failed)
        status = error_set(error, BHVD_ERR_SYSTEM, "no memory for operation '%s'", args->name);
    else if (args->gpu)
        status = nccl_check_gpu(&facts.nccl, args, error);
    if (!status)
        status = stage(op, args, &facts, error);
    if (status) {
        atomic_store(&op->references, 1);
        operation_drop(op);
        return status;
    }
    *out = op;
    return BHVD_OK;
}

void operation_end(struct bhvd_handle *op, const struct bhvd_error *error)
{
    bhvd_context *ctx = op->ctx;
    if (error)
        op->error = *error;
    else if (op->staging && op->staging->codes && !op->staging->by_nccl)
        staged_codes_end(op, &op->error);
    else if (op->staging)
        staging_end(op, &op->error);
    if (op->cached)
        op->cached->operation = NULL;
    op->cached = NULL;
    if (op->phantom) {
        operation_drop(op);
        return;
    }
    pthread_mutex_lock(&ctx->post_lock);
    table_remove(&ctx->names, &op->by_name);
    pthread_mutex_unlock(&ctx->post_lock);
    ctx->counters.operations++;
    atomic_fetch_sub(&ctx->outstanding, 1);
    atomic_store(&op->done, 1);
    futex_wake_all(&op->done);
    operation_drop(op);
}

void operation_end_set(bhvd_context *ctx, uint32_t process_set)
{
    // Those that have their answer lie in the list of executions, and find the set gone when their turn comes.
    struct bhvd_error error;
    error_set(&error, BHVD_ERR_UNSUPPORTED, "process set %u was removed while the operation was in flight", process_set);
    for (;;) {
        struct bhvd_handle *found = NULL;
        pthread_mutex_lock(&ctx->post_lock);
        for (size_t i = 0; i < ctx->names.bucket_count && !found; i++) {
            for (struct table_node *node = ctx->names.buckets[i]; node && !found; node = node->next) {
                struct bhvd_handle *op = TABLE_CONTAINER(node, struct bhvd_handle, by_name);
                if (op->process_set == process_set && op->announced && !op->answered)
                    found = op;
            }
        }
        pthread_mutex_unlock(&ctx->post_lock);
        if (!found)
            return;
        operation_end(found, &error);
    }
}

void operation_drop(struct bhvd_handle *op)
{
    if (!op || atomic_fetch_sub(&op->references, 1) != 1)
        return;
    for (size_t t = 0; t < op->tensor_count; t++)
        bhvd_result_free(op->tensors[t].result);
    staged_codes_destroy(op);
    staging_destroy(op->staging);
    bytes_fini(&op->request);
    free(op->splits);
    free(op->agreed_owned);
    free(op->received_splits);
    free(op);
}

bhvd_status operation_allocate_result(struct tensor *tensor, int64_t dim0)
{
    tensor->result_dim0 = dim0;
    tensor->result_nbytes = (size_t)dim0 * tensor->row_nbytes;
    if (tensor->dst || tensor->result_nbytes == 0)
        return BHVD_OK;
    tensor->result = result_memory_acquire(tensor->result_nbytes);
    tensor->dst = tensor->result;
    return tensor->result ? BHVD_OK : BHVD_ERR_SYSTEM;
}

// ------------------------------------------------------------------------------------------------ public functions

static bhvd_status enqueue(bhvd_context *ctx, struct bhvd_handle *op, struct bhvd_error *error)
{
    struct operation_key key = {op->process_set, op->name_size, op->name};
    uint64_t hash = operation_hash(&key);
    bhvd_status status = BHVD_OK;
    pthread_mutex_lock(&ctx->post_lock);
    if (ctx->closing.status) {
        *error = ctx->closing;
        status = ctx->closing.status;
    } else if (table_find(&ctx->names, hash, operation_has_key, &key)) {
        status = error_set(error, BHVD_ERR_ARGUMENT,
                           "Requested to %s a tensor with the same name as another tensor that is currently being "
                           "processed. If you want to request another tensor, use a different tensor name ('%.*s').",
                           operation_kind_word(op->kind), (int)op->name_size, op->name);
    } else if (!table_insert(&ctx->names, &op->by_name, hash)) {
        status = error_set(error, BHVD_ERR_SYSTEM, "no memory for operation '%.*s'", (int)op->name_size, op->name);
    } else {
        *ctx->posted_tail = op;
        ctx->posted_tail = &op->next;
        atomic_fetch_add(&ctx->outstanding, 1);
        atomic_fetch_add(&ctx->posted_count, 1);
    }
    pthread_mutex_unlock(&ctx->post_lock);
    return status;
}

bhvd_status bhvd_post(bhvd_context *ctx, const struct bhvd_args *args, bhvd_handle **out, struct bhvd_error *error)
{
    struct bhvd_error unused;
    struct bhvd_handle *op;
    *out = NULL;
    if (!error)
        error = &unused;
    bhvd_status status = operation_create(ctx, args, &op, error);
    if (status)
        return status;
    status = enqueue(ctx, op, error);
    if (status) {
        atomic_store(&op->references, 1);
        operation_drop(op);
        return status;
    }
    progress_posted(ctx, args->blocking != 0);
    *out = op;
    error_clear(error);
    return BHVD_OK;
}

bhvd_status bhvd_wait(bhvd_handle *op, int timeout_ms, struct bhvd_error *error)
{
    if (!atomic_load(&op->done) && op->ctx->abandoned)
        return error_set(error, BHVD_ERR_SHUTDOWN, "operation '%.*s' belongs to the parent of this forked process",
                         (int)op->name_size, op->name);
    if (!atomic_load(&op->done))
        progress_wait(op, clock_deadline_ns(timeout_ms));
    if (!atomic_load(&op->done))
        return error_set(error, BHVD_IN_PROGRESS, "operation '%.*s' is in progress", (int)op->name_size, op->name);
    if (error)
        *error = op->error;
    return op->error.status;
}

int bhvd_poll(bhvd_handle *op) { return atomic_load(&op->done) != 0; }

int64_t bhvd_handle_value(bhvd_handle *op) { return op->value; }

void bhvd_handle_drop(bhvd_handle *op) { operation_drop(op); }

bhvd_status bhvd_result(bhvd_handle *op, size_t index, struct bhvd_result *out)
{
    if (!atomic_load(&op->done) || op->error.status || index >= op->tensor_count)
        return BHVD_ERR_ARGUMENT;
    const struct tensor *tensor = &op->tensors[index];
    *out = (struct bhvd_result){tensor->result, tensor->result_nbytes, tensor->result_dim0, 0};
    if (op->staging && op->staging->places[index].result) {
        out->data = op->staging->places[index].result->data;
        out->on_device = 1;
    }
    return BHVD_OK;
}

bhvd_status bhvd_result_take(bhvd_handle *op, size_t index, struct bhvd_result *out)
{
    bhvd_status status = bhvd_result(op, index, out);
    if (!status && out->on_device)
        return BHVD_ERR_ARGUMENT;
    if (!status)
        op->tensors[index].result = NULL;
    return status;
}

void bhvd_result_free(void *data) { result_memory_release(data); }

bhvd_status bhvd_received_splits(bhvd_handle *op, size_t index, int32_t *splits, size_t count)
{
    if (!atomic_load(&op->done) || op->error.status || index >= op->tensor_count || !op->received_splits ||
        count != op->received_size)
        return BHVD_ERR_ARGUMENT;
    memcpy(splits, op->received_splits + index * count, count * sizeof *splits);
    return BHVD_OK;
}
