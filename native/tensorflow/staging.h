/* Memory for tensors of XLA programs while they are communicated: XLA may use its own again once a call returned.
 *
 * A program runs again and again with the same sizes, so blocks are kept for the next run.
 */
#pragma once

#include <stddef.h>

/* A block of at least nbytes, 64-byte aligned; NULL: no memory. */
void *staging_acquire(size_t nbytes);
void staging_release(void *block);      /* release(NULL) is fine */
