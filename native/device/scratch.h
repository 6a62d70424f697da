// Scratch memory for work on one stream, reused after that work; and copies of many spans on the device.
#pragma once

#include "device/buffer.h"
#include "device/spans.h"

// Initialize with {device, stream, NULL}.
struct device_scratch {
    struct bhvd_device *device;
    void *stream;
    struct device_buffer *used;
};

int device_scratch_buffer(struct device_scratch *scratch, enum device_memory memory, size_t nbytes, struct device_buffer **out);
// Device memory.
int device_scratch_acquire(struct device_scratch *scratch, size_t nbytes, void **out);
// Releases all buffers, for reuse after the work that is now on the stream. Returns code, or if that is 0 its own code. Must be
// called in any case.
int device_scratch_release(struct device_scratch *scratch, int code);

// Copies within the device's memory. One launch makes them all, if there may be many and the kernel is loaded; otherwise the driver
// makes each copy when it is added.
struct device_copies {
    struct device_scratch *scratch;
    struct device_span *spans;          // pinned; NULL: copies are made one by one
    uint64_t count, pieces;
};

// Whether one launch would make this many copies.
bool device_copies_launch(const struct bhvd_device *device, size_t count);
// most: upper limit for the number of copies.
int device_copies_begin(struct device_copies *copies, struct device_scratch *scratch, size_t most);
int device_copies_add(struct device_copies *copies, void *dst, const void *src, size_t nbytes);
// Launches the copies. code: a previous error, which is returned unless it is 0.
int device_copies_end(struct device_copies *copies, int code);
