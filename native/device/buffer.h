// Memory of operations: pinned host memory or device memory, cached for reuse; scratch memory for work on one stream, reused after
// that work; and copies of many spans on the device. Sizes of buffers are powers of two, so that few buffers serve all requests.
// Thread-safe, except scratch memory.
#pragma once

#include "device/device.h"
#include "device/spans.h"

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

// ------------------------------------------------------------------------------------------------------------ scratch

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
