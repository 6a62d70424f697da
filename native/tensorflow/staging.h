/* Memory for tensors of XLA programs while they are communicated: XLA may use its own again once a call returned. */
#pragma once

#include <stddef.h>

/* As of base/block_pool.h: up to 1 GiB is kept for the next run. */
void *staging_acquire(size_t nbytes);
void staging_release(void *block);
