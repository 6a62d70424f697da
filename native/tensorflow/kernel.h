/* What the kernels share: reading attributes, tensors as the core sees them, failing. */
#pragma once

#include "tensorflow/core.h"
#include "tensorflow/tf_api.h"

#include <stdbool.h>

#define KERNEL_MAX_NDIM 254     /* TensorFlow's own limit */

/* An attribute; the failure of the construction is left in `status`, and later reads do nothing. */
int64_t kernel_int(TF_OpKernelConstruction *construction, const char *name, TF_Status *status);
double kernel_float(TF_OpKernelConstruction *construction, const char *name, TF_Status *status);
bool kernel_bool(TF_OpKernelConstruction *construction, const char *name, TF_Status *status);
char *kernel_string(TF_OpKernelConstruction *construction, const char *name, TF_Status *status);    /* to free() */

/* The bhvd_dtype of a TensorFlow type, -1 when the core has none. */
int kernel_dtype(int tf_dtype);

/* Copies the dimensions, KERNEL_MAX_NDIM at most; returns their number. */
int kernel_shape(const TF_Tensor *tensor, int64_t *dims);

/* The TensorFlow code by which scripts tell failures apart. */
int kernel_code(bhvd_status status);

/* Makes the op fail. */
void kernel_fail(TF_OpKernelContext *ctx, int code, const char *message);
/* Makes the op fail as `status` says, if it says so; true when it did. */
bool kernel_failed(TF_OpKernelContext *ctx, TF_Status *status);

/* Registers an op and its kernel on the CPU; false: *status says why. strings end with NULL. */
struct kernel_op {
    const char *name;
    const char *const *inputs, *const *outputs, *const *attributes;
    tf_shape_function *shape;
    tf_create_function *create;
    tf_compute_function *compute;               /* this one or the other */
    tf_compute_async_function *compute_async;
    tf_delete_function *destroy;
};
bool kernel_register(const struct kernel_op *op, TF_Status *status);

/* Output i has the shape of input i. */
void kernel_same_shapes(TF_ShapeInferenceContext *ctx, TF_Status *status);
/* Output i has the shape of input i but for the first dimension. */
void kernel_other_rows(TF_ShapeInferenceContext *ctx, TF_Status *status);
void kernel_scalar_shape(TF_ShapeInferenceContext *ctx, TF_Status *status);
void kernel_no_shapes(TF_ShapeInferenceContext *ctx, TF_Status *status);
