// Memory of executions, kept from one to the next: fusion buffers, which hold several tensors as one vector, and scratch.
// Engine only.
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "transport/link.h"

enum { BUFFER_POOL_KEPT = LINK_MATCH_QUEUES }; // one for each execution that may be in flight

struct pool_buffer {
    void *data;
    size_t size;
    int64_t used_ns;                    // time of the last use
};

struct buffer_pool {
    struct pool_buffer scratch;
    struct pool_buffer idle[BUFFER_POOL_KEPT];  // slots of acquired buffers are empty
};

// Scratch memory for one step: at least this size, 64-byte aligned, valid until the next call. NULL: no memory.
void *buffer_pool_scratch(struct buffer_pool *pool, size_t size);
// Memory for concurrent executions: 64-byte aligned, kept between operations. False: no memory.
bool buffer_pool_acquire(struct buffer_pool *pool, size_t size, struct pool_buffer *out);
void buffer_pool_release(struct buffer_pool *pool, struct pool_buffer *buffer);  // NULL data is fine
// Frees buffers that have not been used for BUFFER_POOL_IDLE_MS. Must not be called during a step, which may use scratch.
enum { BUFFER_POOL_IDLE_MS = 10000 };
void buffer_pool_trim(struct buffer_pool *pool, int64_t now_ns);
void buffer_pool_fini(struct buffer_pool *pool);
