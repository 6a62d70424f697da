// What functions share that see tensors as one flat vector (pack.c, adam.c).
#ifndef BHVD_CORE_FLAT_H
#define BHVD_CORE_FLAT_H

#include <stdbool.h>

#include "kernel/kernel.h"

struct flat_casts {
    bhvd_dtype flat;                // the vector's
    struct kernel_table table;      // of it the casts to and from float32 alone, best of this CPU
};

static inline size_t flat_count(const struct bhvd_tensor *tensor)
{
    size_t count = 1;
    for (int d = 0; d < tensor->ndim; d++)
        count *= (size_t)tensor->shape[d];
    return count;
}

// False: there is no such flat form of these tensors.
bool flat_find_casts(struct flat_casts *casts, const struct bhvd_tensor *tensors, size_t count, bhvd_dtype flat);

#endif
