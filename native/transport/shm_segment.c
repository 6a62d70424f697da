#include "transport/shm_segment.h"

#include <poll.h>
#include <sys/eventfd.h>

#include "base/size.h"

void doorbell_ring(struct doorbell *doorbell, int no_wakeup)
{
    uint32_t state = atomic_load(&doorbell->word->state);
    if (state == DOORBELL_AWAKE || (no_wakeup && state == DOORBELL_IDLE))
        return;
    // Only the ringer that resets the word to awake makes the system call.
    if (atomic_exchange(&doorbell->word->state, DOORBELL_AWAKE) != DOORBELL_AWAKE)
        eventfd_write(doorbell->fd, 1);         // full: already ringing
}

void doorbell_drain(struct doorbell *doorbell)
{
    eventfd_read(doorbell->fd, &(eventfd_t){0});
}

bool doorbell_is_rung(const struct doorbell *doorbell)
{
    struct pollfd fd = {.fd = doorbell->fd, .events = POLLIN};
    return poll(&fd, 1, 0) > 0;
}

enum {
    CONTROL_STRIDE = sizeof(struct ring) + RING_CONTROL_BYTES,
    PAIR_STRIDE = 2 * sizeof(struct ring) + RING_CONTROL_BYTES + RING_DATA_BYTES,
    PAGE = 4096
};

static size_t rings_offset(int ranks) { return size_round_up((size_t)ranks * sizeof(struct doorbell_word), PAGE); }

static size_t areas_offset(int ranks)
{
    return size_round_up(rings_offset(ranks) + (size_t)ranks * ranks * PAIR_STRIDE, PAGE);
}

static size_t buffers_offset(int ranks) { return size_round_up((size_t)ranks * sizeof(struct shm_progress), PAGE); }

static size_t slot_size(int ranks)
{
    return buffers_offset(ranks) + (size_t)ranks * SHM_BUFFERS * SHM_BUFFER_BYTES;
}

size_t shm_segment_size(int ranks) { return areas_offset(ranks) + SHM_AREAS * SHM_SLOTS * slot_size(ranks); }

struct doorbell_word *shm_segment_doorbell(const struct shm_segment *memory, int index)
{
    return (struct doorbell_word *)memory->base + index;
}

struct ring *shm_segment_control_ring(const struct shm_segment *memory, int from, int to)
{
    size_t pair = (size_t)from * memory->ranks + to;
    return (struct ring *)(memory->base + rings_offset(memory->ranks) + pair * PAIR_STRIDE);
}

struct ring *shm_segment_data_ring(const struct shm_segment *memory, int from, int to)
{
    return (struct ring *)((unsigned char *)shm_segment_control_ring(memory, from, to) + CONTROL_STRIDE);
}

static unsigned char *slot_base(const struct shm_segment *memory, int area, int slot)
{
    return memory->base + areas_offset(memory->ranks) + (area * SHM_SLOTS + slot) * slot_size(memory->ranks);
}

struct shm_progress *shm_segment_progress(const struct shm_segment *memory, int area, int slot, int index)
{
    return (struct shm_progress *)slot_base(memory, area, slot) + index;
}

unsigned char *shm_segment_buffer(const struct shm_segment *memory, int area, int slot, int index, int buffer)
{
    size_t n = (size_t)index * SHM_BUFFERS + buffer;
    return slot_base(memory, area, slot) + buffers_offset(memory->ranks) + n * SHM_BUFFER_BYTES;
}
