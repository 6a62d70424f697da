// How values of several ranks become one.
#pragma once

#include "kernel/kernel.h"

struct reduction {
    bhvd_dtype dtype;
    kernel_reduce_fn reduce;
    kernel_scale_fn scale;
    double prescale, postscale;         // 1.0: untouched
};

static inline struct reduction reduction_of(const struct kernel_table *kernels, enum kernel_reduction kind, bhvd_dtype dtype,
                                            double prescale, double postscale)
{
    return (struct reduction){dtype, kernels->reduce[kind][dtype], kernels->scale[dtype], prescale, postscale};
}

struct executor_context;
struct work;
// How the values of so many ranks become one.
struct reduction reduction_by(const struct executor_context *run, const struct work *op, bhvd_dtype dtype, int size);
