#include "run/work.h"

struct block_pool result_memory = BLOCK_POOL(RESULT_MEMORY_KEPT);

size_t work_nbytes(const struct work *work)
{
    size_t nbytes = 0;
    for (size_t t = 0; t < work->tensor_count; t++)
        nbytes += work->tensors[t].nbytes;
    return nbytes;
}

bhvd_status tensor_allocate_result(struct tensor *tensor, int64_t dim0)
{
    tensor->result_dim0 = dim0;
    tensor->result_nbytes = (size_t)dim0 * tensor->row_nbytes;
    if (tensor->dst || tensor->result_nbytes == 0)
        return BHVD_OK;
    tensor->result = block_pool_acquire(&result_memory, tensor->result_nbytes);
    tensor->dst = tensor->result;
    return tensor->result ? BHVD_OK : BHVD_ERR_SYSTEM;
}
