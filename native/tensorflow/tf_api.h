/* The part of TensorFlow's C API that the ops use, declared here and looked up by name in the loaded TensorFlow.
 *
 * No TensorFlow header is included and nothing is linked: one binary works with every version with these functions in
 * its C API. Prototypes as in tensorflow/c/{kernels,ops,tf_tensor,tf_status}.h of TensorFlow 2.16 and later.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct TF_Status TF_Status;
typedef struct TF_Tensor TF_Tensor;
typedef struct TF_OpDefinitionBuilder TF_OpDefinitionBuilder;
typedef struct TF_KernelBuilder TF_KernelBuilder;
typedef struct TF_OpKernelConstruction TF_OpKernelConstruction;
typedef struct TF_OpKernelContext TF_OpKernelContext;
typedef struct TF_AsyncOpKernelDoneCallback TF_AsyncOpKernelDoneCallback;
typedef struct TF_ShapeInferenceContext TF_ShapeInferenceContext;
typedef struct TF_ShapeHandle TF_ShapeHandle;

enum tf_code {
    TF_OK = 0, TF_UNKNOWN = 2, TF_INVALID_ARGUMENT = 3, TF_FAILED_PRECONDITION = 9, TF_ABORTED = 10,
    TF_UNIMPLEMENTED = 12,
};

enum tf_dtype {
    TF_FLOAT = 1, TF_DOUBLE = 2, TF_INT32 = 3, TF_UINT8 = 4, TF_INT16 = 5, TF_INT8 = 6, TF_INT64 = 9, TF_BOOL = 10,
    TF_BFLOAT16 = 14, TF_UINT16 = 17, TF_HALF = 19,
};

typedef void tf_deallocator(void *data, size_t nbytes, void *argument);
typedef void tf_shape_function(TF_ShapeInferenceContext *, TF_Status *);
typedef void *tf_create_function(TF_OpKernelConstruction *);
typedef void tf_compute_function(void *, TF_OpKernelContext *);
typedef void tf_compute_async_function(void *, TF_OpKernelContext *, TF_AsyncOpKernelDoneCallback *);
typedef void tf_delete_function(void *);

/* X(result, name without TF_, parameters) */
#define TF_API_FUNCTIONS(X) \
    X(TF_Status *, NewStatus, (void)) \
    X(void, DeleteStatus, (TF_Status *)) \
    X(void, SetStatus, (TF_Status *, int code, const char *message)) \
    X(int, GetCode, (const TF_Status *)) \
    X(const char *, Message, (const TF_Status *)) \
    X(TF_Tensor *, NewTensor, \
      (int dtype, const int64_t *dims, int ndim, void *data, size_t nbytes, tf_deallocator *, void *argument)) \
    X(TF_Tensor *, AllocateTensor, (int dtype, const int64_t *dims, int ndim, size_t nbytes)) \
    X(void, DeleteTensor, (TF_Tensor *)) \
    X(int, TensorType, (const TF_Tensor *)) \
    X(int, NumDims, (const TF_Tensor *)) \
    X(int64_t, Dim, (const TF_Tensor *, int index)) \
    X(size_t, TensorByteSize, (const TF_Tensor *)) \
    X(void *, TensorData, (const TF_Tensor *)) \
    X(TF_OpDefinitionBuilder *, NewOpDefinitionBuilder, (const char *name)) \
    X(void, OpDefinitionBuilderAddAttr, (TF_OpDefinitionBuilder *, const char *)) \
    X(void, OpDefinitionBuilderAddInput, (TF_OpDefinitionBuilder *, const char *)) \
    X(void, OpDefinitionBuilderAddOutput, (TF_OpDefinitionBuilder *, const char *)) \
    X(void, OpDefinitionBuilderSetIsStateful, (TF_OpDefinitionBuilder *, bool)) \
    X(void, OpDefinitionBuilderSetShapeInferenceFunction, (TF_OpDefinitionBuilder *, tf_shape_function *)) \
    X(void, RegisterOpDefinition, (TF_OpDefinitionBuilder *, TF_Status *)) \
    X(TF_ShapeHandle *, NewShapeHandle, (void)) \
    X(void, DeleteShapeHandle, (TF_ShapeHandle *)) \
    X(int64_t, ShapeInferenceContextNumInputs, (TF_ShapeInferenceContext *)) \
    X(void, ShapeInferenceContextGetInput, (TF_ShapeInferenceContext *, int index, TF_ShapeHandle *, TF_Status *)) \
    X(void, ShapeInferenceContextSetOutput, (TF_ShapeInferenceContext *, int index, TF_ShapeHandle *, TF_Status *)) \
    X(TF_ShapeHandle *, ShapeInferenceContextScalar, (TF_ShapeInferenceContext *)) \
    X(TF_ShapeHandle *, ShapeInferenceContextVectorFromSize, (TF_ShapeInferenceContext *, size_t)) \
    X(int64_t, ShapeInferenceContextRank, (TF_ShapeInferenceContext *, TF_ShapeHandle *)) \
    X(int, ShapeInferenceContextRankKnown, (TF_ShapeInferenceContext *, TF_ShapeHandle *)) \
    X(void, ShapeInferenceContextSubshape, \
      (TF_ShapeInferenceContext *, TF_ShapeHandle *, int64_t start, int64_t end, TF_ShapeHandle *out, TF_Status *)) \
    X(void, ShapeInferenceContextConcatenateShapes, \
      (TF_ShapeInferenceContext *, TF_ShapeHandle *, TF_ShapeHandle *, TF_ShapeHandle *out, TF_Status *)) \
    X(void, ShapeInferenceContextSetUnknownShape, (TF_ShapeInferenceContext *, TF_Status *)) \
    X(TF_KernelBuilder *, NewKernelBuilder, \
      (const char *op, const char *device, tf_create_function *, tf_compute_function *, tf_delete_function *)) \
    X(TF_KernelBuilder *, NewAsyncKernelBuilder, \
      (const char *op, const char *device, tf_create_function *, tf_compute_async_function *, tf_delete_function *)) \
    X(void, RegisterKernelBuilder, (const char *name, TF_KernelBuilder *, TF_Status *)) \
    X(void, RunAsyncOpKernelDoneCallback, (TF_AsyncOpKernelDoneCallback *)) \
    X(void, OpKernelConstruction_Failure, (TF_OpKernelConstruction *, TF_Status *)) \
    X(void, OpKernelConstruction_GetAttrSize, \
      (TF_OpKernelConstruction *, const char *name, int32_t *list_size, int32_t *total_size, TF_Status *)) \
    X(void, OpKernelConstruction_GetAttrString, \
      (TF_OpKernelConstruction *, const char *name, char *value, size_t capacity, TF_Status *)) \
    X(void, OpKernelConstruction_GetAttrInt64, (TF_OpKernelConstruction *, const char *name, int64_t *, TF_Status *)) \
    X(void, OpKernelConstruction_GetAttrInt64List, \
      (TF_OpKernelConstruction *, const char *name, int64_t *, int capacity, TF_Status *)) \
    X(void, OpKernelConstruction_GetAttrFloat, (TF_OpKernelConstruction *, const char *name, float *, TF_Status *)) \
    X(void, OpKernelConstruction_GetAttrBool, \
      (TF_OpKernelConstruction *, const char *name, unsigned char *, TF_Status *)) \
    X(int, NumInputs, (TF_OpKernelContext *)) \
    X(void, GetInput, (TF_OpKernelContext *, int index, TF_Tensor **, TF_Status *)) \
    X(void, SetOutput, (TF_OpKernelContext *, int index, const TF_Tensor *, TF_Status *)) \
    X(TF_Tensor *, AllocateOutput, \
      (TF_OpKernelContext *, int index, int dtype, const int64_t *dims, int ndim, size_t nbytes, TF_Status *)) \
    X(TF_Tensor *, ForwardInputOrAllocateOutput, \
      (TF_OpKernelContext *, const int *candidates, int candidate_count, int index, const int64_t *dims, int ndim, \
       int *forwarded, TF_Status *)) \
    X(int64_t, GetIterId, (TF_OpKernelContext *)) \
    X(void, OpKernelContext_Failure, (TF_OpKernelContext *, TF_Status *))

#define TF_API_MEMBER(result, name, parameters) result (*name) parameters;
struct tf_api { TF_API_FUNCTIONS(TF_API_MEMBER) };
#undef TF_API_MEMBER

/* Filled once, before anything is registered. */
extern struct tf_api tf;

/* The address of a symbol in a library that is already loaded, or NULL. */
void *tf_api_symbol(const char *library, const char *symbol);
