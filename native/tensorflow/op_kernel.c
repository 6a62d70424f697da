#include "tensorflow/op_kernel.h"

#include <stdlib.h>
#include <string.h>

int64_t kernel_int(TF_OpKernelConstruction *construction, const char *name, TF_Status *status)
{
    int64_t value = 0;
    if (tf.GetCode(status) == TF_OK)
        tf.OpKernelConstruction_GetAttrInt64(construction, name, &value, status);
    return value;
}

double kernel_float(TF_OpKernelConstruction *construction, const char *name, TF_Status *status)
{
    float value = 0;
    if (tf.GetCode(status) == TF_OK)
        tf.OpKernelConstruction_GetAttrFloat(construction, name, &value, status);
    return value;
}

bool kernel_bool(TF_OpKernelConstruction *construction, const char *name, TF_Status *status)
{
    unsigned char value = 0;
    if (tf.GetCode(status) == TF_OK)
        tf.OpKernelConstruction_GetAttrBool(construction, name, &value, status);
    return value != 0;
}

char *kernel_string(TF_OpKernelConstruction *construction, const char *name, TF_Status *status)
{
    int32_t list_size, nbytes = 0;
    if (tf.GetCode(status) == TF_OK)
        tf.OpKernelConstruction_GetAttrSize(construction, name, &list_size, &nbytes, status);
    char *value = calloc(1, (size_t)nbytes + 1);
    if (value && tf.GetCode(status) == TF_OK)
        tf.OpKernelConstruction_GetAttrString(construction, name, value, (size_t)nbytes, status);
    return value;
}

void kernel_constructed(TF_OpKernelConstruction *construction, TF_Status *status)
{
    if (tf.GetCode(status) != TF_OK)
        tf.OpKernelConstruction_Failure(construction, status);
    tf.DeleteStatus(status);
}

int kernel_dtype(int tf_dtype)
{
    switch (tf_dtype) {
    case TF_UINT8: return BHVD_UINT8;
    case TF_INT8: return BHVD_INT8;
    case TF_UINT16: return BHVD_UINT16;
    case TF_INT16: return BHVD_INT16;
    case TF_INT32: return BHVD_INT32;
    case TF_INT64: return BHVD_INT64;
    case TF_HALF: return BHVD_FLOAT16;
    case TF_FLOAT: return BHVD_FLOAT32;
    case TF_DOUBLE: return BHVD_FLOAT64;
    case TF_BOOL: return BHVD_BOOL;
    case TF_BFLOAT16: return BHVD_BFLOAT16;
    default: return -1;
    }
}

int kernel_shape(const TF_Tensor *tensor, int64_t *dims)
{
    int ndim = tf.NumDims(tensor);
    for (int i = 0; i < ndim && i < KERNEL_MAX_NDIM; i++)
        dims[i] = tf.Dim(tensor, i);
    return ndim;
}

int kernel_code(bhvd_status status)
{
    switch (status) {
    case BHVD_OK: return TF_OK;
    case BHVD_ERR_ARGUMENT: return TF_INVALID_ARGUMENT;
    case BHVD_ERR_MISMATCH: return TF_FAILED_PRECONDITION;
    case BHVD_ERR_UNSUPPORTED: return TF_FAILED_PRECONDITION;
    default: return TF_UNKNOWN;
    }
}

void kernel_fail(TF_OpKernelContext *ctx, int code, const char *message)
{
    TF_Status *status = tf.NewStatus();
    tf.SetStatus(status, code, message);
    tf.OpKernelContext_Failure(ctx, status);
    tf.DeleteStatus(status);
}

bool kernel_failed(TF_OpKernelContext *ctx, TF_Status *status)
{
    if (tf.GetCode(status) == TF_OK)
        return false;
    tf.OpKernelContext_Failure(ctx, status);
    return true;
}

bool kernel_register(const struct kernel_op *op, TF_Status *status)
{
    TF_OpDefinitionBuilder *definition = tf.NewOpDefinitionBuilder(op->name);
    for (const char *const *attribute = op->attributes; *attribute; attribute++)
        tf.OpDefinitionBuilderAddAttr(definition, *attribute);
    for (const char *const *input = op->inputs; *input; input++)
        tf.OpDefinitionBuilderAddInput(definition, *input);
    for (const char *const *output = op->outputs; *output; output++)
        tf.OpDefinitionBuilderAddOutput(definition, *output);
    /* Stateful: TensorFlow never constant-folds it, merges it with an equal op, or prunes it. */
    tf.OpDefinitionBuilderSetIsStateful(definition, true);
    tf.OpDefinitionBuilderSetShapeInferenceFunction(definition, op->shape);
    tf.RegisterOpDefinition(definition, status);
    if (tf.GetCode(status) != TF_OK)
        return false;
    TF_KernelBuilder *kernel = op->compute
        ? tf.NewKernelBuilder(op->name, "CPU", op->create, op->compute, op->destroy)
        : tf.NewAsyncKernelBuilder(op->name, "CPU", op->create, op->compute_async, op->destroy);
    tf.RegisterKernelBuilder(op->name, kernel, status);
    return tf.GetCode(status) == TF_OK;
}

/* ----------------------------------------------------------------------------------------------------- shapes ---- */

void kernel_same_shapes(TF_ShapeInferenceContext *ctx, TF_Status *status)
{
    TF_ShapeHandle *shape = tf.NewShapeHandle();
    for (int i = 0; i < tf.ShapeInferenceContextNumInputs(ctx) && tf.GetCode(status) == TF_OK; i++) {
        tf.ShapeInferenceContextGetInput(ctx, i, shape, status);
        if (tf.GetCode(status) == TF_OK)
            tf.ShapeInferenceContextSetOutput(ctx, i, shape, status);
    }
    tf.DeleteShapeHandle(shape);
}

void kernel_other_rows(TF_ShapeInferenceContext *ctx, TF_Status *status)
{
    tf.ShapeInferenceContextSetUnknownShape(ctx, status);
    TF_ShapeHandle *shape = tf.NewShapeHandle(), *row = tf.NewShapeHandle(), *result = tf.NewShapeHandle();
    /* (size_t)-1 is the unknown dimension. */
    TF_ShapeHandle *rows = tf.ShapeInferenceContextVectorFromSize(ctx, (size_t)-1);
    for (int i = 0; i < tf.ShapeInferenceContextNumInputs(ctx) && tf.GetCode(status) == TF_OK; i++) {
        tf.ShapeInferenceContextGetInput(ctx, i, shape, status);
        if (!tf.ShapeInferenceContextRankKnown(ctx, shape) || tf.ShapeInferenceContextRank(ctx, shape) < 1)
            continue;
        tf.ShapeInferenceContextSubshape(ctx, shape, 1, INT64_MAX, row, status);
        if (tf.GetCode(status) == TF_OK)
            tf.ShapeInferenceContextConcatenateShapes(ctx, rows, row, result, status);
        if (tf.GetCode(status) == TF_OK)
            tf.ShapeInferenceContextSetOutput(ctx, i, result, status);
    }
    tf.DeleteShapeHandle(rows);
    tf.DeleteShapeHandle(result);
    tf.DeleteShapeHandle(row);
    tf.DeleteShapeHandle(shape);
}

void kernel_scalar_shape(TF_ShapeInferenceContext *ctx, TF_Status *status)
{
    TF_ShapeHandle *scalar = tf.ShapeInferenceContextScalar(ctx);
    tf.ShapeInferenceContextSetOutput(ctx, 0, scalar, status);
    tf.DeleteShapeHandle(scalar);
}

void kernel_no_shapes(TF_ShapeInferenceContext *ctx, TF_Status *status) { (void)ctx, (void)status; }
