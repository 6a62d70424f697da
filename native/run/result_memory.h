// Memory of the results that the core allocates.
#pragma once

#include <stddef.h>

enum { RESULT_MEMORY_KEPT = 32 << 20 };     // bytes of freed blocks that a process keeps, at most

// As of base/block_pool.h.
void *result_memory_acquire(size_t nbytes);
void result_memory_release(void *data);
void result_memory_trim(void);
