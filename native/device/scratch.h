// Memory for what is put on one stream now, to be used again after it; and copies of many spans on the device.
#pragma once

#include "device/buffer.h"
#include "device/spans.h"

// {device, stream, NULL} at first.
struct device_scratch {
    struct bhvd_device *device;
    void *stream;
    struct device_buffer *used;
};

int device_scratch_buffer(struct device_scratch *scratch, enum device_memory memory, size_t nbytes, struct device_buffer **out);
// Memory of the device.
int device_scratch_acquire(struct device_scratch *scratch, size_t nbytes, void **out);
// Gives all of it back, to be used again after what the stream was given until now. code: of what was done meanwhile, which
// is returned unless it is 0. To be called in any case.
int device_scratch_release(struct device_scratch *scratch, int code);

// Copies between places in the device's memory. One launch makes them all where they may be many and the kernel is there; else each
// is made when it is added, by the driver.
struct device_copies {
    struct device_scratch *scratch;
    struct device_span *spans;          // pinned; NULL: there is no launch
    uint64_t count, pieces;
};

// Whether one launch makes so many copies.
bool device_copies_launch(const struct bhvd_device *device, size_t count);
// most: how many will be added.
int device_copies_begin(struct device_copies *copies, struct device_scratch *scratch, size_t most);
int device_copies_add(struct device_copies *copies, void *dst, const void *src, size_t nbytes);
// code: of what was done since the begin, which is returned unless it is 0.
int device_copies_end(struct device_copies *copies, int code);
