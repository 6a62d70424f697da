// Memory of the results that the core allocates.
#pragma once

#include <stddef.h>

enum {
    RESULT_MEMORY_ALIGNMENT = 64,
    RESULT_MEMORY_KEPT = 32 << 20           // bytes of freed blocks that a process keeps, at most
};

// At least nbytes, which is not 0; NULL: out of memory. Any thread.
void *result_memory_acquire(size_t nbytes);

// NULL: nothing happens. Any thread, also in a forked child.
void result_memory_release(void *data);

// Keeps nothing any more of what was released until now.
void result_memory_trim(void);
