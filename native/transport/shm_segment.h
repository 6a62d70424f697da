// The shared-memory segment of one host: its ranks' doorbells, a pair of rings for every ordered pair of ranks, and the
// areas with buffers for collectives. One mapping; untouched pages cost nothing.
//
// shm: a memfd created by the host's first rank and passed over UNIX sockets. inproc: anonymous memory of the process.
#pragma once

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

// A doorbell wakes a rank's engine, which sleeps only in poll() on its doorbell and its sockets.
//
// The state word is visible to every rank of the host (shared memory; the world's memory for inproc). After publishing
// something for another rank (bytes in a ring, a count of blocks), a rank rings that rank's doorbell: one load while
// the rank is awake, one eventfd write when it sleeps. No wake-up is lost, because publishing and the state word are
// sequentially consistent on both sides: the sleeper stores the state and then checks again, the ringer publishes and
// then loads the state.
enum doorbell_state {
    DOORBELL_AWAKE = 0,
    DOORBELL_IDLE = 1,  // asleep, no operation of its own in progress: a request to negotiate need not wake it
    DOORBELL_ASLEEP = 2  // asleep, and waiting for something
};

struct doorbell_word {
    _Alignas(64) _Atomic uint32_t state;
    // Counts the rank's progress over sockets: ranks that wait for it in shared memory see that it is not stuck.
    _Alignas(64) _Atomic uint32_t activity;
};

struct doorbell {
    struct doorbell_word *word;
    int fd;                     // eventfd, non-blocking
};

// Wakes the rank if it sleeps. no_wakeup: not when it is idle.
void doorbell_ring(struct doorbell *doorbell, int no_wakeup);
// Resets the eventfd, so that poll() sleeps again.
void doorbell_drain(struct doorbell *doorbell);
// Whether it has been rung since then.
bool doorbell_is_rung(const struct doorbell *doorbell);

enum { RING_CONTROL_BYTES = 64 * 1024, RING_DATA_BYTES = 256 * 1024 };       // powers of two

// A ring: a byte pipe in shared memory with one writer and one reader (channel.c).
// Positions count bytes since the beginning and never wrap (2^64); the index is position % size. All zero is empty.
struct ring {
    _Alignas(64) _Atomic uint64_t tail;         // written by the writer
    _Alignas(64) _Atomic uint64_t head;         // written by the reader
    _Alignas(64) unsigned char data[];
};

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
