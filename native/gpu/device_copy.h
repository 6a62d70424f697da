// An array of the host's memory whose newest values may lie on a GPU: the errors that are fed back there, and replicas, which
// would cost as much to move as what encoding saves. An operation on the GPU reads the newest values and leaves new ones in
// other memory, which takes the place of the old one when the operation has ended well; or it changes them where they lie once
// it can fail no more. So one that fails changes nothing.
// Used by one operation at a time, by any thread.
#pragma once

#include "device/device.h"

struct device_buffer;

struct bhvd_device_array {
    float *values;                      // the host's
    size_t count;
    struct bhvd_device *device;         // held; NULL: the newest values are the host's
    struct device_buffer *buffer;       // there
};

// The newest values on the device, for what the stream is given next, which may change them where they lie. They are brought there
// through pinned memory if need be.
// 0, or the driver's code.
int device_copy_use(struct bhvd_device_array *device_copy, struct bhvd_device *device, void *stream, float **out);
// What the stream was given until now was the last to read or change them.
int device_copy_use_end(struct bhvd_device_array *device_copy, void *stream);
// From now on the newest values are those in the buffer, whose `last` event says when they are there.
void device_copy_adopt(struct bhvd_device_array *device_copy, struct bhvd_device *device, struct device_buffer *buffer);
