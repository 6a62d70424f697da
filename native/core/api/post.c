// Public functions that post operations. They first create an operation from its arguments, and check it.
#include <stdlib.h>

#include "base/block_pool.h"
#include "base/dtype.h"
#include "base/status.h"
#include "core/api/api.h"
#include "core/context/context.h"
#include "core/context/operation.h"
#include "core/message/frame.h"
#include "core/message/request.h"
#include "gpu/staged_codes.h"
#include "gpu/staging.h"

static void tensor_init(struct tensor *out, const struct bhvd_tensor *in)
{
    const size_t row = tensor_elements(in, 1);
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

static int compare_ranks(const void *a, const void *b)
{
    const int32_t x = *(const int32_t *)a, y = *(const int32_t *)b;
    return (x > y) - (x < y);
}

// The ranks of a process set are sorted, so that all ranks send the same request.
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

// Fetches arrays that the host reads or changes and that may have newer values on a GPU.
static bhvd_status fetch_device_copies(const struct bhvd_operation *op, struct bhvd_error *error)
{
    bhvd_status status = op->coll.args.worker_copy ? bhvd_device_array_fetch(op->coll.args.worker_copy, error) : BHVD_OK;
    for (int r = 0; r < REPLICAS && !status; r++)
        status = op->coll.args.replica_copies[r] ? bhvd_device_array_fetch(op->coll.args.replica_copies[r], error) : BHVD_OK;
    return status;
}

// Moves the tensors, residuals and replicas to the memory in which the execution needs them.
static bhvd_status stage(struct bhvd_operation *op, const struct set_facts *facts, struct bhvd_error *error)
{
    const struct bhvd_args *args = &op->coll.args;
    const enum nccl_path path = args->gpu ? nccl_path_of(&facts->nccl, &op->coll) : PATH_HOST;
    if (path == PATH_HOST && staged_codes_apply(&op->coll, facts->nccl.is_hierarchical))
        return staged_codes_create(&op->coll, &op->ctx->exec.kernels, facts->size, facts->rank, error);
    bhvd_status status = path == PATH_HOST ? fetch_device_copies(op, error) : BHVD_OK;
    if (status || !args->gpu)
        return status;
    status = staging_create(&op->coll, facts->size, op->ctx->options.rank, path != PATH_HOST, error);
    bool host_waits = path == PATH_HIERARCHICAL;  // the other ranks' hosts would wait too if it were requested earlier
    for (size_t t = 0; t < args->tensor_count; t++)
        host_waits |= args->tensors[t].dst_on_host != 0;
    if (!status)
        op->coll.staging->host_waits = host_waits;
    return status;
}

// Copies the arguments, and makes all checks that one rank can make alone. After an error the caller releases *out.
static bhvd_status operation_create(bhvd_context *ctx, const struct bhvd_args *args, struct bhvd_operation **out,
                                    struct bhvd_error *error)
{
    struct set_facts facts = {0};
    bhvd_status status = arguments_check(ctx, args, &facts, error);
    if (status)
        return status;
    const char *name = args->kind == BHVD_JOIN ? JOIN_NAME : args->name;      // ranks join after different numbers of operations
    struct bhvd_operation *op = calloc(1, sizeof *op + args->tensor_count * sizeof op->tensors[0]);
    int32_t *splits = copy_splits(args);
    if (!op || (args->split_count && !splits)) {
        free(op);
        free(splits);
        return error_set(error, BHVD_ERR_SYSTEM, "no memory for operation '%s'", name);
    }
    atomic_init(&op->references, 2);            // the caller's handle, and the engine
    atomic_init(&op->state, OPERATION_RUNS);
    op->ctx = ctx;
    struct bhvd_args *kept = &op->coll.args;
    *kept = *args;
    kept->name = name;
    kept->splits = splits;
    for (int r = 0; r < REPLICAS; r++)
        kept->replica_copies[r] = args->replicas[r] ? args->replica_copies[r] : NULL;
    kept->worker_copy = args->worker_residual ? args->worker_copy : NULL;
    kept->server_copy = args->server_residual ? args->server_copy : NULL;
    op->coll.tensors = op->tensors;
    for (size_t t = 0; t < args->tensor_count; t++) {
        tensor_init(&op->coll.tensors[t], &args->tensors[t]);
        if (!args->gpu && op->coll.tensors[t].dst && op->coll.tensors[t].dst != op->coll.tensors[t].src)
            pages_prefer_huge(op->coll.tensors[t].dst, op->coll.tensors[t].nbytes);
    }
    request_write(&op->request, facts.number, kept);
    if (op->request.failed || !request_read_key(op->request.data, op->request.size, &op->key))
        status = error_set(error, BHVD_ERR_SYSTEM, "no memory for operation '%s'", name);
    else if (op->request.size > REQUEST_BYTES_MAX)
        status = error_set(error, BHVD_ERR_ARGUMENT, "'%s' has too many tensors or splits to be requested at once: post "
                           "several groups", name);
    else if (args->gpu)
        status = nccl_check_gpu(&facts.nccl, args, error);
    if (!status)
        status = stage(op, &facts, error);
    kept->tensors = NULL;                       // the caller's, like the name
    kept->name = op->key.name;
    op->coll.name_size = op->key.name_size;
    *out = op;
    return status;
}

// An operation in progress with one of these replicas; NULL: none. Ranks could begin two such operations in different orders, since
// the coordinator does not order pairwise ones. Call with post_lock held.
static const struct bhvd_operation *find_user_of_replicas(const bhvd_context *ctx, const struct bhvd_operation *op)
{
    float *const *replicas = op->coll.args.replicas;
    if (op->coll.args.kind != BHVD_D_LP_S)
        return NULL;
    for (struct table_node *node = NULL; (node = table_next(&ctx->names, node));) {
        const struct bhvd_operation *other = TABLE_CONTAINER(node, struct bhvd_operation, by_name);
        for (int i = 0; i < REPLICAS * REPLICAS && other->coll.args.kind == BHVD_D_LP_S; i++)
            if (replicas[i / REPLICAS] && replicas[i / REPLICAS] == other->coll.args.replicas[i % REPLICAS])
                return other;
    }
    return NULL;
}

// BHVD_ERR_ARGUMENT: an operation of this name, or with these replicas, is in progress; else the error that closed the context.
static bhvd_status operation_enqueue(bhvd_context *ctx, struct bhvd_operation *op, struct bhvd_error *error)
{
    bhvd_status status = BHVD_OK;
    const struct bhvd_operation *user;
    pthread_mutex_lock(&ctx->post_lock);
    if (!context_accepts(ctx, op->coll.args.kind)) {
        *error = ctx->closing;
        status = ctx->closing.status;
    } else if (operation_find_locked(ctx, &op->key)) {
        status = error_set(error, BHVD_ERR_ARGUMENT,
                           "Requested to %s a tensor with the same name as another tensor that is currently being "
                           "processed. If you want to request another tensor, use a different tensor name ('%.*s').",
                           OPERATION_TRAITS[op->coll.args.kind].word, (int)op->coll.name_size, op->coll.args.name);
    } else if ((user = find_user_of_replicas(ctx, op))) {
        status = error_set(error, BHVD_ERR_ARGUMENT, "'%.*s' has replicas that '%.*s' uses, which has not ended: wait for it first",
                           (int)op->coll.name_size, op->coll.args.name, (int)user->coll.name_size, user->coll.args.name);
    } else if (!table_insert(&ctx->names, &op->by_name, operation_hash(&op->key))) {
        status = error_set(error, BHVD_ERR_SYSTEM, "no memory for operation '%.*s'", (int)op->coll.name_size, op->coll.args.name);
    } else {
        fifo_put(&ctx->posted, op, next);
        atomic_fetch_add(&ctx->outstanding, 1);
        atomic_fetch_add(&ctx->posted_count, 1);
    }
    pthread_mutex_unlock(&ctx->post_lock);
    return status;
}

bhvd_status bhvd_post(bhvd_context *ctx, const struct bhvd_args *args, bhvd_handle **out, struct bhvd_error *error)
{
    struct bhvd_error unused;
    struct bhvd_operation *op = NULL;
    *out = NULL;
    if (!error)
        error = &unused;
    bhvd_status status = operation_create(ctx, args, &op, error);
    if (!status)
        status = operation_enqueue(ctx, op, error);
    if (status) {
        if (op)
            atomic_store(&op->references, 1);   // nobody has it yet
        operation_release(op);
        return status;
    }
    if (!args->blocking)                        // else the caller waits at once and makes the progress itself
        doorbell_ring(&ctx->exec.connections.doorbell, 0);
    *out = op;
    error_clear(error);
    return BHVD_OK;
}

bhvd_status bhvd_post_tensor(bhvd_context *ctx, int kind, const char *name, int process_set, uintptr_t src, uintptr_t dst,
                             const int64_t *shape, int ndim, int dtype, int op, int root_rank, double prescale_factor,
                             double postscale_factor, int byte_counter, int wait_ms, struct bhvd_result *result,
                             bhvd_handle **out, struct bhvd_error *error)
{
    const struct bhvd_tensor tensor = {
        .src = (const void *)src,
        .dst = (void *)dst,
        .shape = shape,
        .ndim = ndim,
        .dtype = dtype,
    };
    const struct bhvd_args args = {
        .kind = kind,
        .process_set = process_set,
        .name = name,
        .tensors = &tensor,
        .tensor_count = 1,
        .op = op,
        .root_rank = root_rank,
        .prescale_factor = prescale_factor,
        .postscale_factor = postscale_factor,
        .blocking = wait_ms != 0,
        .device = -1,
        .byte_counter = byte_counter,
    };
    bhvd_handle *posted;
    *result = (struct bhvd_result){0};
    *out = NULL;
    bhvd_status status = bhvd_post(ctx, &args, &posted, error);
    if (!status)
        status = wait_ms ? bhvd_wait(posted, wait_ms, error) : BHVD_IN_PROGRESS;
    if (!status)
        status = bhvd_result_take(posted, 0, result);
    if (status == BHVD_IN_PROGRESS)
        *out = posted;
    else
        bhvd_handle_drop(posted);
    return status;
}
