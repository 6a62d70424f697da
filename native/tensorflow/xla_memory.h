/* Memory for tensors of XLA programs during communication: XLA may reuse its own once a call has returned. */
#pragma once

#include <stddef.h>

/* See base/block_pool.h: up to 1 GiB is kept for the next run. */
void *staging_acquire(size_t nbytes);
void staging_release(void *block);
