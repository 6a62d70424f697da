#include "transport/shm_segment.h"

#include "base/size.h"

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

static size_t staging_buffers_offset(int ranks) { return size_round_up((size_t)ranks * sizeof(struct host_counts), PAGE); }

static size_t staging_slot_size(int ranks)
{
    return staging_buffers_offset(ranks) + (size_t)ranks * HOST_STAGING_BUFFERS * HOST_STAGING_BUFFER_BYTES;
}

size_t shm_segment_size(int ranks) { return areas_offset(ranks) + HOST_AREAS * HOST_STAGING_SLOTS * staging_slot_size(ranks); }

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

static unsigned char *staging_slot_base(const struct shm_segment *memory, int area, int slot)
{
    return memory->base + areas_offset(memory->ranks) + (area * HOST_STAGING_SLOTS + slot) * staging_slot_size(memory->ranks);
}

struct host_counts *shm_segment_counts(const struct shm_segment *memory, int area, int slot, int index)
{
    return (struct host_counts *)staging_slot_base(memory, area, slot) + index;
}

unsigned char *shm_segment_staging_buffer(const struct shm_segment *memory, int area, int slot, int index, int staging_buffer)
{
    size_t n = (size_t)index * HOST_STAGING_BUFFERS + staging_buffer;
    return staging_slot_base(memory, area, slot) + staging_buffers_offset(memory->ranks) + n * HOST_STAGING_BUFFER_BYTES;
}
