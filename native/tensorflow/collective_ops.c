/* The collectives as ops. One kernel serves all kinds: it posts the operation and returns; completion.c completes it.
 * In eager mode (attribute `blocking`) the calling thread itself waits, and drives the progress.
 *
 * Op BaguaHvdFact: numbers of the job, read when the graph runs. In an elastic job they may change between runs.
 */
#include "tensorflow/completion.h"
#include "tensorflow/op_kernel.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* TensorFlow's loops run several iterations in parallel (10 by default), each with the same op. */
#define MAX_PARALLEL_ITERATIONS 64
#define ITERATION_NCHARS 16

struct op_attributes {
    struct bhvd_args args;      /* without tensors */
    char *name;
    bool even;                  /* alltoall: no splits given */
};

/* One execution of the op, until it has ended. */
struct op_call {
    struct completion completion;
    const struct op_attributes *collective;
    TF_OpKernelContext *ctx;
    TF_Tensor *splits;
    int64_t set_size;           /* at posting time: the set may be gone when the execution ends */
    size_t count;
    struct op_tensor {
        TF_Tensor *input, *output;      /* output NULL: the core allocates the result */
    } members[];
};

static void *create(TF_OpKernelConstruction *construction, bhvd_kind kind)
{
    TF_Status *status = tf.NewStatus();
    struct op_attributes *self = calloc(1, sizeof *self);
    struct bhvd_args *args = &self->args;
    *args = (struct bhvd_args){ .kind = kind, .op = BHVD_OP_SUM, .prescale_factor = 1.0, .postscale_factor = 1.0, .device = -1 };
    self->name = kernel_string(construction, "tensor_name", status);
    args->process_set = (int32_t)kernel_int(construction, "process_set_id", status);
    args->blocking = kernel_bool(construction, "blocking", status);
    if (kind == BHVD_ALLREDUCE || kind == BHVD_REDUCESCATTER) {
        args->op = (int32_t)kernel_int(construction, "op", status);
        args->prescale_factor = kernel_float(construction, "prescale_factor", status);
        args->postscale_factor = kernel_float(construction, "postscale_factor", status);
    }
    if (kind == BHVD_BROADCAST)
        args->root_rank = (int32_t)kernel_int(construction, "root_rank", status);
    if (kind == BHVD_ALLTOALL)
        self->even = kernel_bool(construction, "even", status);
    kernel_constructed(construction, status);
    return self;
}

static void destroy(void *kernel)
{
    struct op_attributes *self = kernel;
    if (self)
        free(self->name);
    free(self);
}

static void op_call_free(struct op_call *call)
{
    for (size_t i = 0; i < call->count; i++) {
        if (call->members[i].input)
            tf.DeleteTensor(call->members[i].input);
        if (call->members[i].output)
            tf.DeleteTensor(call->members[i].output);
    }
    if (call->splits)
        tf.DeleteTensor(call->splits);
    free(call);
}

/* ---------------------------------------------------------------------------------------------------- results ---- */

static void release_result(void *data, size_t nbytes, void *unused)
{
    (void)nbytes, (void)unused;
    core.result_free(data);
}

/* Passes the result that the core allocated for a tensor to TensorFlow, without a copy. */
static void set_result(struct op_call *call, size_t index, TF_Status *status)
{
    struct bhvd_result result;
    const TF_Tensor *input = call->members[index].input;
    int64_t dims[KERNEL_MAX_NDIM];
    int ndim = kernel_shape(input, dims);
    if (core.result_take(call->completion.handle, index, &result) != BHVD_OK) {
        tf.SetStatus(status, TF_UNKNOWN, "the operation has no result");
        return;
    }
    dims[0] = result.dim0;
    TF_Tensor *output = result.nbytes
        ? tf.NewTensor(tf.TensorType(input), dims, ndim, result.data, result.nbytes, release_result, NULL)
        : tf.AllocateTensor(tf.TensorType(input), dims, ndim, 0);
    if (!result.nbytes)
        core.result_free(result.data);
    tf.SetOutput(call->ctx, (int)index, output, status);
    tf.DeleteTensor(output);
}

static void set_received_splits(struct op_call *call, TF_Status *status)
{
    const size_t count = (size_t)call->set_size;
    TF_Tensor *output = tf.AllocateOutput(call->ctx, 1, TF_INT32, &call->set_size, 1, count * sizeof(int32_t), status);
    if (tf.GetCode(status) != TF_OK)
        return;
    if (core.received_splits(call->completion.handle, 0, tf.TensorData(output), count) != BHVD_OK)
        tf.SetStatus(status, TF_UNKNOWN, "the operation has no received splits");
    tf.DeleteTensor(output);
}

static void finish(struct completion *completion, bhvd_status end, const struct bhvd_error *error)
{
    struct op_call *call = (struct op_call *)completion;
    if (end != BHVD_OK) {
        kernel_fail(call->ctx, kernel_code(end), error->message);
    } else {
        TF_Status *status = tf.NewStatus();
        for (size_t i = 0; i < call->count && tf.GetCode(status) == TF_OK; i++)
            if (!call->members[i].output)
                set_result(call, i, status);
        if (call->collective->args.kind == BHVD_ALLTOALL && tf.GetCode(status) == TF_OK)
            set_received_splits(call, status);
        kernel_failed(call->ctx, status);
        tf.DeleteStatus(status);
    }
    core.handle_drop(completion->handle);
    op_call_free(call);
}

/* ---------------------------------------------------------------------------------------------------- posting ---- */

/* Number of `rows` that this rank keeps: the first ranks keep one more. 0 for ranks outside the set: the core rejects
 * them. */
static int64_t scattered_rows(bhvd_context *context, int32_t process_set, int64_t rows)
{
    int size = core.process_set_size(context, process_set), rank = core.process_set_rank(context, process_set);
    return size < 1 || rank < 0 ? 0 : rows / size + (rank < rows % size);
}

/* Gets input `index`, and allocates its output unless the core does. */
static bool take_member(struct op_call *call, bhvd_context *context, int index, struct bhvd_tensor *tensor, int64_t *dims,
                        TF_Status *status)
{
    const struct bhvd_args *args = &call->collective->args;
    struct op_tensor *member = &call->members[index];
    tf.GetInput(call->ctx, index, &member->input, status);
    if (tf.GetCode(status) != TF_OK)
        return false;
    int ndim = kernel_shape(member->input, dims);
    int dtype = tf.TensorType(member->input);
    size_t nbytes = tf.TensorByteSize(member->input);
    if (args->kind == BHVD_REDUCESCATTER) {
        if (ndim < 1) {
            tf.SetStatus(status, TF_INVALID_ARGUMENT,
                         "Reducescatter needs a tensor of at least one dimension, but got a 0-d one.");
            return false;
        }
        int64_t rows = dims[0];
        dims[0] = scattered_rows(context, args->process_set, rows);
        member->output = tf.AllocateOutput(call->ctx, index, dtype, dims, ndim,
                                           rows ? nbytes / (size_t)rows * (size_t)dims[0] : 0, status);
        dims[0] = rows;
    } else if (args->kind == BHVD_ALLREDUCE || args->kind == BHVD_BROADCAST) {
        /* In place if nobody else uses the input. For that our own reference must be released first. */
        int forwarded = -1;
        tf.DeleteTensor(member->input);
        member->input = NULL;
        member->output = tf.ForwardInputOrAllocateOutput(call->ctx, &index, 1, index, dims, ndim, &forwarded, status);
        if (tf.GetCode(status) == TF_OK && forwarded < 0)
            tf.GetInput(call->ctx, index, &member->input, status);
    }
    if (tf.GetCode(status) != TF_OK)
        return false;
    tensor->dst = member->output ? tf.TensorData(member->output) : NULL;
    tensor->src = member->input ? tf.TensorData(member->input) : tensor->dst;
    tensor->shape = dims;
    tensor->ndim = ndim;
    tensor->dtype = kernel_dtype(dtype);
    return true;
}

static bool take_splits(struct op_call *call, struct bhvd_args *args, TF_Status *status)
{
    tf.GetInput(call->ctx, 1, &call->splits, status);
    if (tf.GetCode(status) != TF_OK || call->collective->even)
        return tf.GetCode(status) == TF_OK;
    if (tf.NumDims(call->splits) != 1) {
        tf.SetStatus(status, TF_INVALID_ARGUMENT, "alltoall expects a 1-D splits tensor.");
        return false;
    }
    args->splits = tf.TensorData(call->splits);
    args->split_count = (size_t)tf.Dim(call->splits, 0);
    return true;
}

/* Posts the operation. On failure *status has the reason, and nothing is in progress. */
static bool post(struct op_call *call, bhvd_context *context, TF_Status *status)
{
    const struct op_attributes *self = call->collective;
    struct bhvd_error error;
    struct bhvd_args args = self->args;
    struct bhvd_tensor *tensors = calloc(call->count + 1, sizeof *tensors);
    int64_t *dims = malloc((call->count + 1) * KERNEL_MAX_NDIM * sizeof *dims);
    size_t name_size = strlen(self->name) + ITERATION_NCHARS;
    char *name = malloc(name_size);
    bool ok = tensors && dims && name;
    if (!ok)
        tf.SetStatus(status, TF_UNKNOWN, "out of memory");
    for (size_t i = 0; ok && i < call->count; i++)
        ok = take_member(call, context, (int)i, &tensors[i], dims + i * KERNEL_MAX_NDIM, status);
    if (ok && args.kind == BHVD_ALLTOALL)
        ok = take_splits(call, &args, status);
    if (ok) {
        int64_t iteration = tf.GetIterId(call->ctx) % MAX_PARALLEL_ITERATIONS;
        if (iteration)
            snprintf(name, name_size, "%s.%" PRId64, self->name, iteration);
        else
            snprintf(name, name_size, "%s", self->name);
        args.name = name;
        args.tensors = call->count ? tensors : NULL;
        args.tensor_count = call->count;
        call->set_size = core.process_set_size(context, args.process_set);
        bhvd_status posted = core.post(context, &args, &call->completion.handle, &error);
        ok = posted == BHVD_OK;
        if (!ok)
            tf.SetStatus(status, kernel_code(posted), error.message);
    }
    free(name);
    free(dims);
    free(tensors);
    return ok;
}

static void compute(void *kernel, TF_OpKernelContext *ctx, TF_AsyncOpKernelDoneCallback *done)
{
    const struct op_attributes *self = kernel;
    size_t count = self->args.kind == BHVD_ALLTOALL ? 1 : self->args.kind == BHVD_BARRIER ? 0 : (size_t)tf.NumInputs(ctx);
    struct op_call *call = calloc(1, sizeof *call + count * sizeof call->members[0]);
    TF_Status *status = tf.NewStatus();
    call->collective = self;
    call->ctx = ctx;
    call->count = count;
    call->completion.finish = finish;
    bhvd_context *context = core_acquire(NULL);
    bool posted = false;
    if (context)
        posted = post(call, context, status);
    else
        tf.SetStatus(status, TF_FAILED_PRECONDITION, CORE_NOT_INITIALIZED);
    if (!posted) {
        core_release();
        kernel_failed(ctx, status);
        op_call_free(call);
        tf.RunAsyncOpKernelDoneCallback(done);
    } else {
        /* Registered before the context can go away: the drain at shutdown counts it. */
        bool kept = done_keep(&call->completion.done, done);
        completion_begin();
        core_release();
        if (kept && !self->args.blocking)
            completion_add(&call->completion);
        else
            completion_wait(&call->completion);
    }
    tf.DeleteStatus(status);
}

/* ----------------------------------------------------------------------------------------------- registration ---- */

#define REDUCED_TYPES "{uint8, int8, int32, int64, half, float, double, bfloat16}"
#define SCATTERED_TYPES "{int32, int64, half, float, double, bfloat16}"
#define COMMON_ATTRIBUTES "tensor_name: string", "process_set_id: int = 0", "blocking: bool = false"
#define REDUCTION_ATTRIBUTES "op: int", "prescale_factor: float = 1.0", "postscale_factor: float = 1.0"

#define COLLECTIVE(lower, upper) \
    static void *create_##lower(TF_OpKernelConstruction *construction) { return create(construction, BHVD_##upper); }
COLLECTIVE(allreduce, ALLREDUCE)
COLLECTIVE(allgather, ALLGATHER)
COLLECTIVE(broadcast, BROADCAST)
COLLECTIVE(alltoall, ALLTOALL)
COLLECTIVE(reducescatter, REDUCESCATTER)
COLLECTIVE(barrier, BARRIER)

bool collective_register(TF_Status *status)
{
    const struct kernel_op ops[] = {
        { .name = "BaguaHvdAllreduce", .inputs = STRINGS("tensors: T"), .outputs = STRINGS("outputs: T"),
          .attributes = STRINGS("T: list(" REDUCED_TYPES ") >= 1", REDUCTION_ATTRIBUTES, COMMON_ATTRIBUTES),
          .shape = kernel_same_shapes, .create = create_allreduce },
        { .name = "BaguaHvdAllgather", .inputs = STRINGS("tensors: T"), .outputs = STRINGS("outputs: T"),
          .attributes = STRINGS("T: list(" ALL_TYPES ") >= 1", COMMON_ATTRIBUTES),
          .shape = kernel_other_rows, .create = create_allgather },
        { .name = "BaguaHvdBroadcast", .inputs = STRINGS("tensors: T"), .outputs = STRINGS("outputs: T"),
          .attributes = STRINGS("T: list(" ALL_TYPES ") >= 1", "root_rank: int", COMMON_ATTRIBUTES),
          .shape = kernel_same_shapes, .create = create_broadcast },
        { .name = "BaguaHvdAlltoall", .inputs = STRINGS("tensor: T", "splits: int32"),
          .outputs = STRINGS("output: T", "received_splits: int32"),
          .attributes = STRINGS("T: " ALL_TYPES, "even: bool = false", COMMON_ATTRIBUTES),
          .shape = kernel_other_rows, .create = create_alltoall },
        { .name = "BaguaHvdReducescatter", .inputs = STRINGS("tensors: T"), .outputs = STRINGS("outputs: T"),
          .attributes = STRINGS("T: list(" SCATTERED_TYPES ") >= 1", REDUCTION_ATTRIBUTES, COMMON_ATTRIBUTES),
          .shape = kernel_other_rows, .create = create_reducescatter },
        { .name = "BaguaHvdBarrier", .inputs = NO_STRINGS, .outputs = NO_STRINGS,
          .attributes = STRINGS(COMMON_ATTRIBUTES), .shape = kernel_no_shapes, .create = create_barrier },
    };
    for (size_t i = 0; i < sizeof ops / sizeof *ops; i++) {
        struct kernel_op op = ops[i];
        op.compute_async = compute;
        op.destroy = destroy;
        if (!kernel_register(&op, status))
            return false;
    }
    return true;
}

/* ------------------------------------------------------------------------------------------------------ facts ---- */

struct fact {
    char *name;
    int32_t process_set;
};

/* process_set_included: Horovod's results besides 0 and 1. */
enum { INCLUDED_NOT_INITIALIZED = -1, INCLUDED_UNKNOWN_SET = -3 };

static int included(bhvd_context *context, int process_set)
{
    if (!context)
        return INCLUDED_NOT_INITIALIZED;
    int rank = core.process_set_rank(context, process_set);
    return rank >= 0 ? 1 : rank == -1 ? 0 : INCLUDED_UNKNOWN_SET;
}

static bhvd_status look_up(bhvd_context *context, const struct core_job *job, const char *name, int32_t process_set,
                           int32_t *value)
{
    if (strcmp(name, "process_set_included") == 0) {
        *value = included(context, process_set);
        return BHVD_OK;
    }
    if (!context)
        return BHVD_ERR_UNSUPPORTED;
    if (strcmp(name, "size") == 0)
        *value = core.process_set_size(context, process_set);
    else if (strcmp(name, "process_set_rank") == 0)
        *value = core.process_set_rank(context, process_set);
    else if (strcmp(name, "rank") == 0)
        *value = core.process_set_rank(context, 0);
    else if (strcmp(name, "local_rank") == 0)
        *value = job->local_rank;
    else
        *value = job->local_size;
    return *value < 0 ? BHVD_ERR_ARGUMENT : BHVD_OK;
}

bhvd_status fact_value(const char *name, int32_t process_set, int32_t *value, const char **message)
{
    struct core_job job;
    bhvd_context *context = core_acquire(&job);
    bhvd_status status = look_up(context, &job, name, process_set, value);
    core_release();
    *message = status == BHVD_ERR_UNSUPPORTED ? CORE_NOT_INITIALIZED
        : "Process set provided does not exist, or does not hold this rank.";
    return status;
}

static void *fact_create(TF_OpKernelConstruction *construction)
{
    TF_Status *status = tf.NewStatus();
    struct fact *self = calloc(1, sizeof *self);
    self->name = kernel_string(construction, "fact", status);
    self->process_set = (int32_t)kernel_int(construction, "process_set_id", status);
    kernel_constructed(construction, status);
    return self;
}

static void fact_destroy(void *kernel)
{
    struct fact *self = kernel;
    if (self)
        free(self->name);
    free(self);
}

static void fact_compute(void *kernel, TF_OpKernelContext *ctx)
{
    const struct fact *self = kernel;
    const char *message;
    int32_t value = 0;
    bhvd_status found = fact_value(self->name, self->process_set, &value, &message);
    if (found != BHVD_OK) {
        kernel_fail(ctx, kernel_code(found), message);
        return;
    }
    TF_Status *status = tf.NewStatus();
    TF_Tensor *output = tf.AllocateOutput(ctx, 0, TF_INT32, NULL, 0, sizeof value, status);
    if (!kernel_failed(ctx, status)) {
        *(int32_t *)tf.TensorData(output) = value;
        tf.DeleteTensor(output);
    }
    tf.DeleteStatus(status);
}

bool fact_register(TF_Status *status)
{
    const struct kernel_op op = {
        .name = "BaguaHvdFact", .inputs = NO_STRINGS, .outputs = STRINGS("value: int32"),
        .attributes = STRINGS("fact: {'size', 'rank', 'local_size', 'local_rank', 'process_set_rank', 'process_set_included'}",
                              "process_set_id: int = 0"),
        .shape = kernel_scalar_shape, .create = fact_create, .compute = fact_compute, .destroy = fact_destroy,
    };
    return kernel_register(&op, status);
}
