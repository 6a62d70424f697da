// How values of several ranks are combined.
#pragma once

#include "executor/executor.h"

struct reduction {
    bhvd_dtype dtype;
    kernel_reduce_fn reduce;
    kernel_scale_fn scale;
    double prescale, postscale;         // 1.0: no scaling
};

static inline struct reduction reduction_of(const struct kernel_table *kernels, enum kernel_reduction kind, bhvd_dtype dtype,
                                            double prescale, double postscale)
{
    return (struct reduction){dtype, kernels->reduce[kind][dtype], kernels->scale[dtype], prescale, postscale};
}

// The reduction of values of `size` ranks. Average is a sum whose postscale includes 1 / size (one multiplication, not
// two).
static inline struct reduction reduction_by(const struct executor *exec, const struct collective *coll, bhvd_dtype dtype, int size)
{
    const enum kernel_reduction kind = coll->op == BHVD_OP_MIN       ? KERNEL_MIN
                                       : coll->op == BHVD_OP_MAX     ? KERNEL_MAX
                                       : coll->op == BHVD_OP_PRODUCT ? KERNEL_PRODUCT
                                                                   : KERNEL_SUM;
    return reduction_of(&exec->kernels, kind, dtype, coll->prescale_factor, collective_sum_factor(coll, size));
}
