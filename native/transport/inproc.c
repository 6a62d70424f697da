// The inproc transport: n ranks are n threads of one process, for tests. The "host memory" is anonymous memory.
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/status.h"
#include "transport/connect.h"
#include "transport/connect_local.h"

struct inproc_world {
    struct shm_segment memory;
    int doorbell_fds[];         // by rank, duplicated into every link
};

void *bhvd_inproc_world_create(int size)
{
    if (size < 1)
        return NULL;
    struct inproc_world *world = calloc(1, sizeof *world + (size_t)size * sizeof(int));
    if (!world)
        return NULL;
    size_t bytes = shm_segment_size(size);
    void *base = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED) {
        free(world);
        return NULL;
    }
    world->memory = (struct shm_segment){.base = base, .size = bytes, .ranks = size};
    for (int i = 0; i < size; i++)
        world->doorbell_fds[i] = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    return world;
}

void bhvd_inproc_world_destroy(void *handle)
{
    struct inproc_world *world = handle;
    if (!world)
        return;
    for (int i = 0; i < world->memory.ranks; i++)
        close(world->doorbell_fds[i]);
    munmap(world->memory.base, world->memory.size);
    free(world);
}

bhvd_status inproc_connect(struct connections *c, void *handle, struct bhvd_error *error)
{
    struct inproc_world *world = handle;
    if (!world || world->memory.ranks != c->size)
        return error_set(error, BHVD_ERR_ARGUMENT, "transport \"inproc\" needs a world of %d ranks", c->size);
    c->shm = world->memory;
    c->local_index = c->rank;
    c->local_size = c->size;
    c->doorbell = (struct doorbell){shm_segment_doorbell(&c->shm, c->rank), dup(world->doorbell_fds[c->rank])};
    for (int peer = 0; peer < c->size; peer++) {
        if (peer != c->rank)
            connections_use_rings(c, peer, peer, dup(world->doorbell_fds[peer]));
    }
    return BHVD_OK;
}
