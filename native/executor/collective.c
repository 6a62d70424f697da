#include "executor/collective.h"

struct block_pool result_memory = BLOCK_POOL(RESULT_MEMORY_KEPT);

size_t collective_nbytes(const struct collective *coll)
{
    size_t nbytes = 0;
    for (size_t t = 0; t < coll->tensor_count; t++)
        nbytes += coll->tensors[t].nbytes;
    return nbytes;
}
