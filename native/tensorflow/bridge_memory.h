/* The memory of a tensor that Python holds while the core reads and writes it. */
#pragma once

struct bridge_memory {
    void *owner;
    void (*release)(struct bridge_memory *);
};

struct bridge_memory *bridge_memory_create(void *owner, void (*release)(struct bridge_memory *));

/* Releases the memory. Any thread. Python calls it once for every put. */
void bhvd_tf_release(struct bridge_memory *memory);
