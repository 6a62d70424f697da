#include "core/answer.h"

#include "base/dtype.h"

// The rows of `count` ranks, `stride` apart: none negative, and together of a size that memory can have.
static bool add_rows(const int64_t *rows, int count, int stride, size_t row_nbytes, int64_t *sum)
{
    size_t nbytes;
    *sum = 0;
    for (int i = 0; i < count; i++) {
        if (rows[i * stride] < 0 || __builtin_add_overflow(*sum, rows[i * stride], sum))
            return false;
    }
    return !__builtin_mul_overflow((size_t)*sum, row_nbytes, &nbytes) && nbytes <= PTRDIFF_MAX;
}

static bool agrees_gathered(const struct process_set *set, const struct tensor *tensor, const int64_t *dim0)
{
    int64_t sum;
    return dim0[set->rank] == tensor->dim0 && add_rows(dim0, set->size, 1, tensor->row_nbytes, &sum);
}

static bool agrees_exchanged(const struct process_set *set, const struct tensor *tensor, const int64_t *splits)
{
    const int n = set->size;
    int64_t sent, received;
    for (int from = 0; from < n; from++) {
        for (int to = 0; to < n; to++) {
            if (splits[from * n + to] > INT32_MAX)
                return false;
        }
        if (!add_rows(splits + from * n, n, 1, tensor->row_nbytes, &sent))
            return false;
        if (from == set->rank && sent > tensor->dim0)
            return false;
    }
    return add_rows(splits + set->rank, n, n, tensor->row_nbytes, &received);
}

bool answer_agrees(const struct process_set *set, const struct bhvd_handle *op, const int64_t *agreed, size_t count)
{
    const size_t n = (size_t)set->size;
    if (op->kind == BHVD_JOIN)
        return count == 1 && agreed[0] >= 0 && agreed[0] < set->size;
    size_t per_tensor = op->kind == BHVD_ALLGATHER ? n : op->kind == BHVD_ALLTOALL ? n * n : 0;
    if (set->rank < 0 || count != per_tensor * op->tensor_count)
        return false;
    for (size_t t = 0; t < op->tensor_count && per_tensor; t++) {
        const int64_t *of_tensor = agreed + t * per_tensor;
        if (!(op->kind == BHVD_ALLGATHER ? agrees_gathered(set, &op->tensors[t], of_tensor)
                                         : agrees_exchanged(set, &op->tensors[t], of_tensor)))
            return false;
    }
    return true;
}

bool answer_continues(const struct execution *execution, const struct bhvd_handle *op)
{
    if (op->process_set != execution->process_set)
        return false;
    if (execution->count == 0)
        return true;
    const struct bhvd_handle *first = execution->operations[0];
    return first->kind == BHVD_ALLREDUCE && op->kind == BHVD_ALLREDUCE && op->op == first->op &&
           op->prescale_factor == first->prescale_factor && op->postscale_factor == first->postscale_factor;
}

bool answer_has_zeros(const struct request *request)
{
    struct bhvd_codec_options options = {.parameter = request->codec_parameter};
    bool low_precision = request->kind == BHVD_C_LP_S, floats_only = low_precision || request->op == BHVD_OP_ADASUM;
    if ((request->kind != BHVD_ALLREDUCE && !low_precision) || (low_precision && request->op > BHVD_OP_SUM))
        return false;
    for (uint32_t t = 0; t < request->tensor_count; t++) {
        bhvd_dtype dtype = request->tensors[t].dtype;
        if (floats_only && !dtype_is_floating(dtype))
            return false;
        if (low_precision && (dtype != request->tensors[0].dtype ||
                              !bhvd_encoded_size(request->codec, dtype, 1, &options)))
            return false;
    }
    return true;
}
