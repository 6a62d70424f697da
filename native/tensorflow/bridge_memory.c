#include "tensorflow/bridge_memory.h"

#include <stdlib.h>

struct bridge_memory *bridge_memory_create(void *owner, void (*release)(struct bridge_memory *))
{
    struct bridge_memory *memory = malloc(sizeof *memory);
    memory->owner = owner;
    memory->release = release;
    return memory;
}

__attribute__((visibility("default"))) void bhvd_tf_release(struct bridge_memory *memory)
{
    memory->release(memory);
    free(memory);
}
