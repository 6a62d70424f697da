// The shared-memory segment of one host: its ranks' doorbells, a pair of rings for every ordered pair of ranks, and the
// areas with buffers for collectives. One mapping; untouched pages cost nothing.
//
// shm: a memfd created by the host's first rank and passed over UNIX sockets. inproc: anonymous memory of the process.
#pragma once

#include <stddef.h>

#include "transport/doorbell.h"
#include "transport/ring.h"

enum {
    SHM_BUFFER_BYTES = 256 * 1024,  // two of a rank's and the reader's part of a peer's fit into an L2 cache
    SHM_BUFFERS = 8,        // how many blocks a rank may be ahead of the others (executor/shared.h)
    SHM_SLOTS = 5,          // per area: buffers and progress of one collective at a time; 0: of those that run to completion
    SHM_AREAS = 64          // process sets with an id below this have an area
};

// A rank's progress in a slot of an area, by step: blocks done since the area was created. Written only by that rank.
enum shm_step { SHM_COPIED_IN, SHM_REDUCED, SHM_COPIED_OUT, SHM_STEPS };

struct shm_progress {
    _Alignas(128) _Atomic uint64_t done[SHM_STEPS];     // 128: the adjacent-line prefetcher must not couple two ranks'
};

struct shm_segment {
    unsigned char *base;
    size_t size;
    int ranks;                      // on this host; the indices below are positions among them
};

size_t shm_segment_size(int ranks);

struct doorbell_word *shm_segment_doorbell(const struct shm_segment *memory, int index);
struct ring *shm_segment_control_ring(const struct shm_segment *memory, int from, int to);
struct ring *shm_segment_data_ring(const struct shm_segment *memory, int from, int to);
struct shm_progress *shm_segment_progress(const struct shm_segment *memory, int area, int slot, int index);
unsigned char *shm_segment_buffer(const struct shm_segment *memory, int area, int slot, int index, int buffer);
