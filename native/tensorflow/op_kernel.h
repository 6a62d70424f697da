/* Helpers for the kernels: attributes, tensors in the core's terms, failures. */
#pragma once

#include "tensorflow/core.h"
#include "tensorflow/tf_api.h"

#include <stdbool.h>

#define KERNEL_MAX_NDIM 254     /* TensorFlow's own limit */

/* Reads an attribute; on failure `status` has the reason, and later reads do nothing. */
int64_t kernel_int(TF_OpKernelConstruction *construction, const char *name, TF_Status *status);
double kernel_float(TF_OpKernelConstruction *construction, const char *name, TF_Status *status);
bool kernel_bool(TF_OpKernelConstruction *construction, const char *name, TF_Status *status);
char *kernel_string(TF_OpKernelConstruction *construction, const char *name, TF_Status *status);    /* free() it */

/* The bhvd_dtype of a TensorFlow type; -1: the core does not support it. */
int kernel_dtype(int tf_dtype);

/* Copies at most KERNEL_MAX_NDIM dimensions; returns their number. */
int kernel_shape(const TF_Tensor *tensor, int64_t *dims);

/* The TensorFlow error code, by which scripts distinguish failures. */
int kernel_code(bhvd_status status);

/* Makes the op fail. */
void kernel_fail(TF_OpKernelContext *ctx, int code, const char *message);
/* Makes the op fail if `status` is an error; returns whether it is. */
bool kernel_failed(TF_OpKernelContext *ctx, TF_Status *status);

/* Registers an op and its kernel on the CPU; false: *status has the reason. The lists of strings end with NULL. */
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
/* Output i has the shape of input i, except the first dimension. */
void kernel_other_rows(TF_ShapeInferenceContext *ctx, TF_Status *status);
void kernel_scalar_shape(TF_ShapeInferenceContext *ctx, TF_Status *status);
void kernel_no_shapes(TF_ShapeInferenceContext *ctx, TF_Status *status);
