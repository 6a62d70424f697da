#include "run/work.h"

struct block_pool result_memory = BLOCK_POOL(RESULT_MEMORY_KEPT);

size_t work_nbytes(const struct work *work)
{
    size_t nbytes = 0;
    for (size_t t = 0; t < work->tensor_count; t++)
        nbytes += work->tensors[t].nbytes;
    return nbytes;
}
