// Pinned host memory or device memory for operations, cached for reuse. Sizes are powers of two, so that few buffers serve all
// requests. Thread-safe.
#pragma once

#include "device/device.h"

struct device_buffer {
    struct device_buffer *next;
    enum device_memory memory;
    unsigned char *data;                // 256-byte aligned
    size_t size;
    void *ready, *done;                 // events, for the owner's use
    void *last;                         // the event after which it is no longer in use; NULL: none was recorded
};

// A cached buffer that the GPU has finished with, or a new one, of at least this size. 0, or the driver's error, with *out NULL.
int device_buffer_acquire(struct bhvd_device *device, enum device_memory memory, size_t nbytes,
                          struct device_buffer **out);
// Returns it to the cache; it is reused when its `last` event has passed. release(NULL) is allowed.
void device_buffer_release(struct bhvd_device *device, struct device_buffer *buffer);
// When the device is destroyed: waits for pending work.
void device_buffers_free(struct bhvd_device *device);

// Records the end of its use on a stream; it is not reused before.
int device_buffer_record(struct bhvd_device *device, struct device_buffer *buffer, void *stream);
