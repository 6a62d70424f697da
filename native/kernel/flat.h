// Functions for tensors seen as one flat vector (pack.c, adam_update.c).
#pragma once

#include <stdbool.h>

#include "base/dtype.h"
#include "kernel/kernel.h"

enum { FLAT_BLOCK = 1024 };         // elements that stay in the cache while they are converted

// Whether a vector of this dtype can hold the values of these tensors.
bool flat_is_possible(const struct bhvd_tensor *tensors, size_t count, bhvd_dtype flat);

// A tensor's elements i ... i + n - 1 in the flat dtype: in place, or converted into `scratch`.
static inline const void *flat_load(bhvd_dtype flat, const struct bhvd_tensor *tensor, size_t i, size_t n, void *scratch)
{
    const char *from = (const char *)tensor->src + i * bhvd_dtype_size((bhvd_dtype)tensor->dtype);
    if (tensor->dtype == (int32_t)flat)
        return from;
    kernel_table_best()->to_float[tensor->dtype](scratch, from, n);
    return scratch;
}

// Where to compute these elements: in place, or in `scratch` if flat_store has to convert them.
static inline void *flat_target(bhvd_dtype flat, const struct bhvd_tensor *tensor, size_t i, void *scratch)
{
    const bool same = tensor->dtype == (int32_t)flat;
    return same ? (char *)tensor->dst + i * bhvd_dtype_size((bhvd_dtype)tensor->dtype) : scratch;
}

static inline void flat_store(const struct bhvd_tensor *tensor, size_t i, size_t n, const void *from)
{
    void *to = (char *)tensor->dst + i * bhvd_dtype_size((bhvd_dtype)tensor->dtype);
    if (from != to)
        kernel_table_best()->from_float[tensor->dtype](to, from, n);
}

// Iterates over every block of every tensor: tensor `t`, its elements i ... i + n - 1; the tensor begins at `at` in a flat vector.
#define FOR_EACH_FLAT_BLOCK(tensors, count)                                                                   \
    for (size_t t = 0, at = 0, of; t < (count) && (of = tensor_elements(&(tensors)[t], 0), true); at += of, t++) \
        for (size_t i = 0, n; i < of && (n = of - i < FLAT_BLOCK ? of - i : FLAT_BLOCK); i += n)
