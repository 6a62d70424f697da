#include "tensorflow/bridge.h"

#include "tensorflow/bridge_memory.h"
#include "tensorflow/kernel.h"

#include <stdlib.h>
#include <string.h>

struct bridge_op {
    int64_t id, index;
};

static void *create_put(TF_OpKernelConstruction *construction)
{
    TF_Status *status = tf.NewStatus();
    struct bridge_op *self = calloc(1, sizeof *self);
    self->id = kernel_int(construction, "bridge", status);
    self->index = kernel_int(construction, "index", status);
    if (tf.GetCode(status) != TF_OK)
        tf.OpKernelConstruction_Failure(construction, status);
    tf.DeleteStatus(status);
    return self;
}

static void *create_wait(TF_OpKernelConstruction *construction)
{
    TF_Status *status = tf.NewStatus();
    struct bridge_op *self = calloc(1, sizeof *self);
    self->id = kernel_int(construction, "bridge", status);
    if (tf.GetCode(status) != TF_OK)
        tf.OpKernelConstruction_Failure(construction, status);
    tf.DeleteStatus(status);
    return self;
}

static void release_tensor(struct bridge_memory *memory)
{
    tf.DeleteTensor(memory->owner);
}

/* The output of a put, over the input's memory when nobody else uses that, else over a copy. */
static TF_Tensor *take(TF_OpKernelContext *ctx, int64_t *dims, int *ndim, TF_Status *status)
{
    TF_Tensor *input = NULL;
    tf.GetInput(ctx, 0, &input, status);
    if (tf.GetCode(status) != TF_OK)
        return NULL;
    *ndim = kernel_shape(input, dims);
    tf.DeleteTensor(input);
    int index = 0, forwarded = -1;
    TF_Tensor *output = tf.ForwardInputOrAllocateOutput(ctx, &index, 1, 0, dims, *ndim, &forwarded, status);
    if (tf.GetCode(status) != TF_OK)
        return NULL;
    if (forwarded < 0) {
        tf.GetInput(ctx, 0, &input, status);
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

static void compute_put(void *kernel, TF_OpKernelContext *ctx)
{
    const struct bridge_op *self = kernel;
    int64_t dims[KERNEL_MAX_NDIM];
    struct bhvd_tensor tensor = { .shape = dims };
    TF_Status *status = tf.NewStatus();
    TF_Tensor *output = take(ctx, dims, &tensor.ndim, status);
    if (!kernel_failed(ctx, status)) {
        struct bhvd_error error = { 0 };
        struct bridge_memory *memory = bridge_memory_create(output, release_tensor);
        tensor.dtype = kernel_dtype(tf.TensorType(output));
        tensor.src = tensor.dst = tf.TensorData(output);
        int end = core.python_put(self->id, self->index, &tensor, memory, &error);
        if (end != BHVD_OK)
            kernel_fail(ctx, kernel_code(end), error.message);
    }
    tf.DeleteStatus(status);
}

static void compute_wait(void *kernel, TF_OpKernelContext *ctx)
{
    const struct bridge_op *self = kernel;
    struct bhvd_error error = { 0 };
    int end = core.python_wait(self->id, &error);
    if (end != BHVD_OK) {
        kernel_fail(ctx, kernel_code(end), error.message);
        return;
    }
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

#define STRINGS(...) (const char *const[]){ __VA_ARGS__, NULL }
#define TYPES "{uint8, int8, uint16, int16, int32, int64, half, float, double, bool, bfloat16}"

bool bridge_register(TF_Status *status)
{
    const struct kernel_op put = {
        .name = "BaguaHvdBridgePut", .inputs = STRINGS("tensor: T"), .outputs = STRINGS("buffer: T"),
        .attributes = STRINGS("T: " TYPES, "bridge: int", "index: int"), .shape = kernel_same_shapes,
        .create = create_put, .compute = compute_put, .destroy = free,
    };
    const struct kernel_op wait = {
        .name = "BaguaHvdBridgeWait", .inputs = STRINGS("buffers: T"), .outputs = STRINGS("outputs: T"),
        .attributes = STRINGS("T: list(" TYPES ") >= 1", "bridge: int"), .shape = kernel_same_shapes,
        .create = create_wait, .compute = compute_wait, .destroy = free,
    };
    return kernel_register(&put, status) && kernel_register(&wait, status);
}
