#include "run/result_memory.h"

#include "base/block_pool.h"

static struct block_pool pool = BLOCK_POOL(RESULT_MEMORY_KEPT);

void *result_memory_acquire(size_t nbytes) { return block_pool_acquire(&pool, nbytes); }
void result_memory_release(void *data) { block_pool_release(&pool, data); }
void result_memory_trim(void) { block_pool_trim(&pool); }
