/* Ops BaguaHvdBridgePut and BaguaHvdBridgeWait: pass tensors of a graph to Python in place, and take them back.
 *
 * Put passes tensors to Python (core.python_put) once they exist; Python's reducer communicates them in place. Wait
 * takes the outputs of all puts, lets Python finish (core.python_wait), and outputs the same memory, now with results.
 */
#include "tensorflow/op_kernel.h"

#include <stdlib.h>
#include <string.h>

struct bridge_op {
    int64_t id;
    int32_t count;
    int64_t indices[];      /* of the tensors that it puts */
};

static void *create(TF_OpKernelConstruction *construction)
{
    TF_Status *status = tf.NewStatus();
    int32_t count = 0, nbytes;
    tf.OpKernelConstruction_GetAttrSize(construction, "indices", &count, &nbytes, status);
    count = tf.GetCode(status) == TF_OK && count > 0 ? count : 0;
    struct bridge_op *self = calloc(1, sizeof *self + (size_t)count * sizeof self->indices[0]);
    self->id = kernel_int(construction, "bridge", status);
    self->count = count;
    if (count)
        tf.OpKernelConstruction_GetAttrInt64List(construction, "indices", self->indices, count, status);
    kernel_constructed(construction, status);
    return self;
}

__attribute__((visibility("default"))) void bhvd_tf_release(struct bridge_memory *memory) { memory->release(memory); }

static void release_tensor(struct bridge_memory *memory)
{
    tf.DeleteTensor(memory->data);
    free(memory);
}

/* Output `place`, in the memory of that input if nobody else uses it, else in a copy. */
static TF_Tensor *take(TF_OpKernelContext *ctx, int place, int64_t *dims, int *ndim, TF_Status *status)
{
    TF_Tensor *input = NULL;
    tf.GetInput(ctx, place, &input, status);
    if (tf.GetCode(status) != TF_OK)
        return NULL;
    *ndim = kernel_shape(input, dims);
    tf.DeleteTensor(input);
    int forwarded = -1;
    TF_Tensor *output = tf.ForwardInputOrAllocateOutput(ctx, &place, 1, place, dims, *ndim, &forwarded, status);
    if (tf.GetCode(status) != TF_OK)
        return NULL;
    if (forwarded < 0) {
        tf.GetInput(ctx, place, &input, status);
        if (tf.GetCode(status) != TF_OK) {
            tf.DeleteTensor(output);
            return NULL;
        }
        if (tf.TensorByteSize(input))
            memcpy(tf.TensorData(output), tf.TensorData(input), tf.TensorByteSize(input));
        tf.DeleteTensor(input);
    }
    return output;
}

/* Passes the memory of output `place` to Python; false: the op has failed. */
static bool put(TF_OpKernelContext *ctx, const struct bridge_op *self, int place)
{
    int64_t dims[KERNEL_MAX_NDIM];
    struct bhvd_tensor tensor = { .shape = dims };
    TF_Status *status = tf.NewStatus();
    TF_Tensor *output = take(ctx, place, dims, &tensor.ndim, status);
    bool failed = kernel_failed(ctx, status);
    if (!failed) {
        struct bhvd_error error = { 0 };
        struct bridge_memory *memory = malloc(sizeof *memory);
        *memory = (struct bridge_memory){ release_tensor, output };
        tensor.dtype = kernel_dtype(tf.TensorType(output));
        tensor.src = tensor.dst = tf.TensorData(output);
        int end = core.python_put(self->id, self->indices[place], &tensor, memory, &error);
        failed = end != BHVD_OK;
        if (failed)
            kernel_fail(ctx, kernel_code(end), error.message);
    }
    tf.DeleteStatus(status);
    return !failed;
}

/* Blocks until Python is done; false: the op has failed. */
static bool wait(TF_OpKernelContext *ctx, const struct bridge_op *self)
{
    struct bhvd_error error = { 0 };
    int end = core.python_wait(self->id, &error);
    if (end != BHVD_OK)
        kernel_fail(ctx, kernel_code(end), error.message);
    return end == BHVD_OK;
}

static bool put_all(TF_OpKernelContext *ctx, const struct bridge_op *self)
{
    bool ok = tf.NumInputs(ctx) == self->count;
    if (!ok)
        kernel_fail(ctx, TF_INVALID_ARGUMENT, "indices: expected one for each tensor");
    for (int i = 0; i < self->count && ok; i++)
        ok = put(ctx, self, i);
    return ok;
}

static void compute_put(void *kernel, TF_OpKernelContext *ctx) { put_all(ctx, kernel); }

static void compute_exchange(void *kernel, TF_OpKernelContext *ctx)
{
    if (put_all(ctx, kernel))
        wait(ctx, kernel);
}

static void compute_wait(void *kernel, TF_OpKernelContext *ctx)
{
    if (!wait(ctx, kernel))
        return;
    TF_Status *status = tf.NewStatus();
    for (int i = 0; i < tf.NumInputs(ctx) && tf.GetCode(status) == TF_OK; i++) {
        TF_Tensor *tensor = NULL;
        tf.GetInput(ctx, i, &tensor, status);
        if (tf.GetCode(status) != TF_OK)
            break;
        tf.SetOutput(ctx, i, tensor, status);
        tf.DeleteTensor(tensor);
    }
    kernel_failed(ctx, status);
    tf.DeleteStatus(status);
}

bool bridge_register(TF_Status *status)
{
    static const struct { const char *name; tf_compute_function *compute; } ops[] = {
        { "BaguaHvdBridgePut", compute_put },
        { "BaguaHvdBridgeWait", compute_wait },
        /* Put and wait in one op, for eager mode: all tensors exist already, and every op costs a call from Python. */
        { "BaguaHvdBridgeExchange", compute_exchange },
    };
    for (size_t i = 0; i < sizeof ops / sizeof *ops; i++) {
        const struct kernel_op op = {
            .name = ops[i].name, .inputs = STRINGS("tensors: T"), .outputs = STRINGS("outputs: T"),
            .attributes = STRINGS("T: list(" ALL_TYPES ") >= 1", "bridge: int", "indices: list(int) = []"),
            .shape = kernel_same_shapes, .create = create, .compute = ops[i].compute, .destroy = free,
        };
        if (!kernel_register(&op, status))
            return false;
    }
    return true;
}
