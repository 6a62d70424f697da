// Memory of executions, kept from one to the next: fusion buffers, which hold several tensors as one vector, and scratch.
// Engine only.
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "transport/link.h"

enum { FUSION_KEPT = LINK_MATCH_QUEUES }; // one for each execution that may be in flight

struct fusion_buffer {
    void *data;
    size_t size;
    int64_t used_ns;                    // time of the last use
};

struct fusion {
    struct fusion_buffer scratch;
    struct fusion_buffer idle[FUSION_KEPT];     // slots of borrowed buffers are empty
};

// Scratch memory for one step: at least this size, 64-byte aligned, valid until the next call. NULL: no memory.
void *fusion_acquire(struct fusion *fusion, size_t size);
// Memory for concurrent executions: 64-byte aligned, kept between operations. False: no memory.
bool fusion_borrow(struct fusion *fusion, size_t size, struct fusion_buffer *out);
void fusion_return(struct fusion *fusion, struct fusion_buffer *buffer);       // NULL data is fine
// Frees buffers that have not been used for FUSION_IDLE_MS. Must not be called during a step, which may use scratch.
enum { FUSION_IDLE_MS = 10000 };
void fusion_trim(struct fusion *fusion, int64_t now_ns);
void fusion_fini(struct fusion *fusion);
