// Functions for tensors seen as one flat vector (pack.c, adam_update.c).
#pragma once

#include <stdbool.h>

#include "kernel/kernel.h"

static inline size_t flat_count(const struct bhvd_tensor *tensor)
{
    size_t count = 1;
    for (int d = 0; d < tensor->ndim; d++)
        count *= (size_t)tensor->shape[d];
    return count;
}

// Whether a vector of this dtype can hold the values of these tensors.
bool flat_is_possible(const struct bhvd_tensor *tensors, size_t count, bhvd_dtype flat);
