#include "core/context/operation.h"

#include <stdlib.h>

#include "base/clock.h"
#include "base/dtype.h"
#include "base/futex.h"
#include "base/pages.h"
#include "base/status.h"
#include "core/api/arguments.h"
#include "core/context/completions.h"
#include "core/context/context.h"
#include "core/message/request.h"
#include "gpu/mirror.h"
#include "gpu/staged_codes.h"
#include "gpu/staging.h"

static const struct {
    const char *name, *word;
} KINDS[OPERATION_KINDS] = {
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
    return operation->process_set == key->process_set && operation->work.name_size == key->name_size &&
           memcmp(operation->work.name, key->name, key->name_size) == 0;
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

static int compare_ranks(const void *a, const void *b)
{
    const int32_t x = *(const int32_t *)a, y = *(const int32_t *)b;
    return (x > y) - (x < y);
}

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

// What the host reads or changes of arrays that may have newer values on a GPU.
static bhvd_status fetch_mirrors(const struct bhvd_handle *op, struct bhvd_error *error)
{
    bhvd_status status = op->work.worker_mirror ? bhvd_mirror_fetch(op->work.worker_mirror, error) : BHVD_OK;
    for (int r = 0; r < REPLICAS && !status; r++)
        status = op->work.replica_mirrors[r] ? bhvd_mirror_fetch(op->work.replica_mirrors[r], error) : BHVD_OK;
    return status;
}

// To where the execution wants the tensors, the errors to be fed back, and replicas.
static bhvd_status stage(struct bhvd_handle *op, const struct bhvd_args *args, const struct set_facts *facts,
                         struct bhvd_error *error)
{
    const enum nccl_way way = args->gpu ? nccl_way_of(&facts->nccl, &op->work) : WAY_HOST;
    if (way == WAY_HOST && staged_codes_take(&op->work, args, facts->nccl.has_levels))
        return staged_codes_create(&op->work, &op->ctx->run.kernels, args, facts->size, facts->rank, error);
    bhvd_status status = way == WAY_HOST ? fetch_mirrors(op, error) : BHVD_OK;
    if (status || !args->gpu)
        return status;
    status = staging_create(&op->work, args, facts->size, op->ctx->options.rank, way != WAY_HOST, error);
    if (!status)
        op->work.staging->host_waits = way == WAY_LEVELS;
    return status;
}

bhvd_status operation_create(bhvd_context *ctx, const struct bhvd_args *args, struct bhvd_handle **out,
                             struct bhvd_error *error)
{
    struct set_facts facts = {0};
    bhvd_status status = arguments_check(ctx, args, &facts, error);
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
    atomic_init(&op->state, OPERATION_RUNS);
    op->ctx = ctx;
    op->work.kind = args->kind;
    op->process_set = facts.number;
    op->account = args->account;
    op->work.op = args->op;
    op->work.root_rank = args->root_rank;
    op->work.prescale_factor = args->prescale_factor;
    op->work.postscale_factor = args->postscale_factor;
    op->work.codec = args->codec;
    op->work.codec_options = args->codec_options;
    op->work.exchange = args->exchange;
    op->work.topology = args->topology;
    op->work.round = args->round;
    op->work.hierarchical = args->hierarchical != 0;
    op->on_gpu = args->gpu != NULL;
    for (int r = 0; r < REPLICAS; r++) {
        op->work.replicas[r] = args->replicas[r];
        op->work.replica_mirrors[r] = args->replicas[r] ? args->replica_mirrors[r] : NULL;
        op->work.before[1 + r] = args->before[r];
        op->work.mixes_before |= args->before[r] != 0;
        op->work.mixes_after |= args->after[1 + r] != 0;
    }
    op->work.before[0] = 1;
    memcpy(op->work.after, args->after, sizeof op->work.after);
    op->work.worker_error = args->worker_error;
    op->work.server_error = args->server_error;
    op->work.worker_mirror = args->worker_error ? args->worker_mirror : NULL;
    op->work.server_mirror = args->server_error ? args->server_mirror : NULL;
    op->work.tensor_count = args->tensor_count;
    op->work.tensors = op->tensors;
    for (size_t t = 0; t < args->tensor_count; t++) {
        tensor_init(&op->work.tensors[t], &args->tensors[t]);
        if (!args->gpu && op->work.tensors[t].dst != op->work.tensors[t].src)
            pages_prefer_huge(op->work.tensors[t].dst, op->work.tensors[t].nbytes);
    }
    request_write(&op->request, facts.number, args);
    op->work.name_size = (uint16_t)strlen(args->name);
    op->work.name = (const char *)op->request.data + sizeof(uint32_t) + sizeof(uint16_t);
    if (op->request.failed)
        status = error_set(error, BHVD_ERR_SYSTEM, "no memory for operation '%s'", args->name);
    else if (op->request.size > REQUEST_BYTES_MAX)
        status = error_set(error, BHVD_ERR_ARGUMENT, "'%s' has too many tensors or splits to be announced at once: post "
                           "several groups", args->name);
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
    else if (op->work.staging && op->work.staging->codes && !op->work.staging->by_nccl)
        staged_codes_end(&op->work, &op->error);
    else if (op->work.staging)
        staging_end(&op->work, &op->error);
    if (op->cached)
        op->cached->cached.user = NULL;
    op->cached = NULL;
    if (op->work.phantom) {
        operation_drop(op);
        return;
    }
    pthread_mutex_lock(&ctx->post_lock);
    table_remove(&ctx->names, &op->by_name);
    if (op->error.cause && !ctx->first_loss.cause)
        ctx->first_loss = op->error;
    pthread_mutex_unlock(&ctx->post_lock);
    ctx->counters.operations++;
    atomic_fetch_sub(&ctx->outstanding, 1);
    if (atomic_exchange(&op->state, OPERATION_ENDED) == OPERATION_RUNS_AWAITED)
        futex_wake_all(&op->state);
    completions_operation_ended(op);
    operation_drop(op);
}

void operation_sleep(struct bhvd_handle *op, int64_t deadline_ns)
{
    uint32_t runs = OPERATION_RUNS;
    atomic_compare_exchange_strong(&op->state, &runs, OPERATION_RUNS_AWAITED);
    futex_wait(&op->state, OPERATION_RUNS_AWAITED, deadline_ns);
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
    for (size_t t = 0; t < op->work.tensor_count; t++)
        bhvd_result_free(op->work.tensors[t].result);
    staged_codes_destroy(&op->work);
    staging_destroy(op->work.staging);
    bytes_fini(&op->request);
    free(op->splits);
    free(op->agreed_owned);
    free(op->carried);
    free(op->received_splits);
    free(op);
}

bhvd_status operation_enqueue(bhvd_context *ctx, struct bhvd_handle *op, struct bhvd_error *error)
{
    struct operation_key key = {op->process_set, op->work.name_size, op->work.name};
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
                           operation_kind_word(op->work.kind), (int)op->work.name_size, op->work.name);
    } else if (!table_insert(&ctx->names, &op->by_name, hash)) {
        status = error_set(error, BHVD_ERR_SYSTEM, "no memory for operation '%.*s'", (int)op->work.name_size, op->work.name);
    } else {
        *ctx->posted_tail = op;
        ctx->posted_tail = &op->next;
        atomic_fetch_add(&ctx->outstanding, 1);
        atomic_fetch_add(&ctx->posted_count, 1);
    }
    pthread_mutex_unlock(&ctx->post_lock);
    return status;
}
