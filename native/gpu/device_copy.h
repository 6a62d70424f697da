// A host array whose newest values may be on a GPU: error-feedback state, and replicas. To move them would cost as much as encoding
// saves. An operation on the GPU reads the newest values and writes new ones to other memory, which replaces the old one when the
// operation has succeeded; or it changes them in place once it can no longer fail. So an operation that fails changes nothing.
// Used by one operation at a time, from any thread.
#pragma once

#include "device/device.h"

struct device_buffer;

struct bhvd_device_array {
    float *values;                      // the host's values
    size_t count;
    struct bhvd_device *device;         // held; NULL: the host has the newest values
    struct device_buffer *buffer;       // the newest values on the device
};

// The newest values on the device, for work that is put on the stream next, which may change them in place. Copies them there
// through pinned memory if necessary. Returns 0 or the driver's error.
int device_copy_use(struct bhvd_device_array *device_copy, struct bhvd_device *device, void *stream, float **out);
// The last work that uses them has been put on the stream.
int device_copy_use_end(struct bhvd_device_array *device_copy, void *stream);
// The buffer now holds the newest values; its `last` event marks when they are complete.
void device_copy_adopt(struct bhvd_device_array *device_copy, struct bhvd_device *device, struct device_buffer *buffer);
