#include "run/reduction.h"

#include "run/run.h"

static enum kernel_reduction kernel_reduction_of(bhvd_op op)
{
    switch (op) {
    case BHVD_OP_MIN: return KERNEL_MIN;
    case BHVD_OP_MAX: return KERNEL_MAX;
    case BHVD_OP_PRODUCT: return KERNEL_PRODUCT;
    default: return KERNEL_SUM;
    }
}

struct reduction reduction_by(const struct executor_context *run, const struct work *op, bhvd_dtype dtype, int size)
{
    // Average is a sum, with the size taken out of the second factor (one multiplication, not two).
    return reduction_of(&run->kernels, kernel_reduction_of(op->op), dtype, op->prescale_factor, work_sum_factor(op, size));
}
