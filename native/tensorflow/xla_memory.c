#include "tensorflow/xla_memory.h"

#include "base/block_pool.h"

static struct block_pool pool = BLOCK_POOL((size_t)1 << 30);

void *staging_acquire(size_t nbytes) { return block_pool_acquire(&pool, nbytes); }
void staging_release(void *block) { block_pool_release(&pool, block); }
