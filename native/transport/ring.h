// A ring: a byte pipe in shared memory with one writer and one reader. Used by inproc and shm.
#pragma once

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

enum { RING_CONTROL_BYTES = 64 * 1024, RING_DATA_BYTES = 256 * 1024 };       // powers of two

// Positions count bytes since the beginning and never wrap (2^64); the index is position % size. All zero is empty.
struct ring {
    _Alignas(64) _Atomic uint64_t tail;         // written by the writer
    _Alignas(64) _Atomic uint64_t head;         // written by the reader
    _Alignas(64) unsigned char data[];
};

// Moves at most `size` bytes and returns how many; 0: full, or empty.
size_t ring_write(struct ring *ring, size_t capacity, const void *src, size_t size);
size_t ring_read(struct ring *ring, size_t capacity, void *dst, size_t size);
