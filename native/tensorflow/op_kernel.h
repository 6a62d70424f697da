/* The ops, and helpers for their kernels: attributes, tensors in the core's terms, failures. */
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

/* Makes the construction fail if `status` is an error, and deletes the status. */
void kernel_constructed(TF_OpKernelConstruction *construction, TF_Status *status);

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
#define STRINGS(...) (const char *const[]){ __VA_ARGS__, NULL }
#define NO_STRINGS (const char *const[]){ NULL }
#define ALL_TYPES "{uint8, int8, uint16, int16, int32, int64, half, float, double, bool, bfloat16}"
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

/* -------------------------------------------------------------------------------------------------------- the ops ---- */

/* Each registers its ops; false: *status has the reason. */
bool collective_register(TF_Status *status);    /* BaguaHvdAllreduce, ...Allgather, ...Broadcast and so on */
bool bridge_register(TF_Status *status);        /* BaguaHvdBridgePut, ...Wait, ...Exchange */
bool fact_register(TF_Status *status);          /* BaguaHvdFact */

/* Registers the custom calls that replace the ops in programs compiled by XLA. NULL on success, else the part of the
 * installed TensorFlow that is missing. */
const char *xla_calls_register(void);

/* The number called `name`; returns BHVD_OK, or an error with *message set. */
bhvd_status fact_value(const char *name, int32_t process_set, int32_t *value, const char **message);

/* The memory of a tensor that Python holds while the core reads and writes it. release also frees this. */
struct bridge_memory {
    void (*release)(struct bridge_memory *);
    void *data;
};

/* Releases the memory. Any thread. Python calls it once for every put. */
void bhvd_tf_release(struct bridge_memory *memory);
