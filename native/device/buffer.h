// Memory that a device reads or writes for an operation, kept and given out again: pinned memory of the host, and memory of
// the device itself. Sizes are powers of two, so that few serve all. Thread-safe.
#pragma once

#include "device/device.h"

struct device_buffer {
    struct device_buffer *next;
    enum device_memory memory;
    unsigned char *data;                // 256-byte aligned
    size_t size;
    void *ready, *done;                 // events, for the owner's use
    void *last;                         // the event after which nobody uses it; NULL: none was recorded
};

// A free one that the GPU is done with, else a new one, of at least this size. 0, or the driver's code, with *out NULL.
int device_buffer_acquire(struct bhvd_device *device, enum device_memory memory, size_t nbytes,
                          struct device_buffer **out);
// It is given out again when its `last` event has passed. release(NULL) is fine.
void device_buffer_release(struct bhvd_device *device, struct device_buffer *buffer);
// When the device is destroyed: waits for what is under way.
void device_buffers_free(struct bhvd_device *device);

// Records the end of its use on a stream: nobody gets it before.
int device_buffer_record(struct bhvd_device *device, struct device_buffer *buffer, void *stream);
