// The element types, listed once: enumerator, public name, storage type in C.
#pragma once

#include <stdbool.h>

#include "bagua_hvd.h"

#define DTYPES(X)                        \
    X(BHVD_UINT8, "uint8", uint8_t)      \
    X(BHVD_INT8, "int8", int8_t)         \
    X(BHVD_UINT16, "uint16", uint16_t)   \
    X(BHVD_INT16, "int16", int16_t)      \
    X(BHVD_INT32, "int32", int32_t)      \
    X(BHVD_INT64, "int64", int64_t)      \
    X(BHVD_FLOAT16, "float16", uint16_t) \
    X(BHVD_FLOAT32, "float32", float)    \
    X(BHVD_FLOAT64, "float64", double)   \
    X(BHVD_BOOL, "bool", uint8_t)        \
    X(BHVD_BFLOAT16, "bfloat16", uint16_t)

// The product of the dimensions from the first-th on.
static inline size_t tensor_elements(const struct bhvd_tensor *tensor, int first)
{
    size_t count = 1;
    for (int d = first; d < tensor->ndim; d++)
        count *= (size_t)tensor->shape[d];
    return count;
}

// Whether a number from the wire or from a caller is a valid type.
static inline bool dtype_is_valid(int dtype) { return dtype >= 0 && dtype < BHVD_DTYPE_COUNT; }

static inline bool dtype_is_floating(int dtype)
{
    return dtype == BHVD_FLOAT16 || dtype == BHVD_FLOAT32 || dtype == BHVD_FLOAT64 || dtype == BHVD_BFLOAT16;
}
