#include "core/negotiation/response_check.h"

#include "base/dtype.h"

// Are all row numbers of `count` ranks non-negative, with a total size that fits into memory?
static bool can_be_held(const int64_t *rows, int count, size_t row_nbytes)
{
    size_t nbytes;
    int64_t sum = 0;
    for (int i = 0; i < count; i++) {
        if (rows[i] < 0 || __builtin_add_overflow(sum, rows[i], &sum))
            return false;
    }
    return !__builtin_mul_overflow((size_t)sum, row_nbytes, &nbytes) && nbytes <= PTRDIFF_MAX;
}

static bool agrees_gathered(const struct process_set *set, const struct tensor *tensor, const int64_t *dim0)
{
    return dim0[set->group.rank] == tensor->dim0 && can_be_held(dim0, set->group.size, tensor->row_nbytes);
}

// The rank has checked the rows that it sends itself.
static bool agrees_exchanged(const struct process_set *set, const struct bhvd_operation *op, const struct tensor *tensor,
                             const int64_t *received)
{
    const int64_t longest = received[set->group.size];
    size_t nbytes;
    for (int i = 0; i < set->group.size; i++) {
        if (received[i] > longest || operation_split(op, tensor, i, set->group.size) > longest)
            return false;
    }
    return longest <= INT32_MAX && received[set->group.rank] == operation_split(op, tensor, set->group.rank, set->group.size) &&
           !__builtin_mul_overflow((size_t)longest, tensor->row_nbytes, &nbytes) &&
           can_be_held(received, set->group.size, tensor->row_nbytes);
}

bool response_agrees(const struct process_set *set, const struct bhvd_operation *op)
{
    const int64_t *numbers = op->response_numbers;
    const size_t count = op->response_number_count;
    if (op->coll.kind == BHVD_JOIN)
        return count == 1 && numbers[0] >= 0 && numbers[0] < set->group.size;
    const size_t per_tensor = response_count(op->coll.kind, set->group.size);
    if (set->group.rank < 0 || count != per_tensor * op->coll.tensor_count)
        return false;
    for (size_t t = 0; t < op->coll.tensor_count && per_tensor; t++) {
        const int64_t *of_tensor = numbers + t * per_tensor;
        if (!(op->coll.kind == BHVD_ALLGATHER ? agrees_gathered(set, &op->coll.tensors[t], of_tensor)
                                         : agrees_exchanged(set, op, &op->coll.tensors[t], of_tensor)))
            return false;
    }
    return true;
}

bool response_continues(const struct execution *execution, const struct bhvd_operation *op)
{
    if (op->process_set != execution->process_set)
        return false;
    if (execution->count == 0)
        return true;
    struct collective *first = execution->colls[0];
    return first->kind == BHVD_ALLREDUCE && op->coll.kind == BHVD_ALLREDUCE && op->coll.op == first->op &&
           op->coll.prescale_factor == first->prescale_factor && op->coll.postscale_factor == first->postscale_factor &&
           operation_of(first)->on_gpu == op->on_gpu;
}

bool response_has_zeros(const struct request *request)
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
