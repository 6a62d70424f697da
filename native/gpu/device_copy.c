#include "gpu/device_copy.h"

#include <stdlib.h>
#include <string.h>

#include "base/status.h"
#include "device/buffer.h"

bhvd_device_array *bhvd_device_array_create(float *values, size_t count)
{
    bhvd_device_array *device_copy = calloc(1, sizeof *device_copy);
    if (device_copy)
        *device_copy = (struct bhvd_device_array){.values = values, .count = count};
    return device_copy;
}

static void forget(struct bhvd_device_array *device_copy)
{
    if (!device_copy->device)
        return;
    device_buffer_release(device_copy->device, device_copy->buffer);
    bhvd_device_drop(device_copy->device);
    device_copy->device = NULL;
    device_copy->buffer = NULL;
}

void bhvd_device_array_destroy(bhvd_device_array *device_copy)
{
    if (!device_copy)
        return;
    forget(device_copy);
    free(device_copy);
}

static int fetch(struct bhvd_device_array *device_copy)
{
    struct bhvd_device *device = device_copy->device;
    const struct device_ops *ops = device->ops;
    int failed = ops->stream_wait_event(device, device->to_host, device_copy->buffer->last);
    failed = failed ?: ops->copy(device, device_copy->values, device_copy->buffer->data, device_copy->count * sizeof(float),
                               device->to_host);
    failed = failed ?: device_buffer_record(device, device_copy->buffer, device->to_host);
    return failed ?: ops->event_wait(device, device_copy->buffer->done);
}

bhvd_status bhvd_device_array_fetch(bhvd_device_array *device_copy, struct bhvd_error *error)
{
    if (device_copy->device) {
        int failed = fetch(device_copy);
        if (failed)
            return device_failed(device_copy->device, failed, "the device copy of error states or replicas cannot be read", error);
        forget(device_copy);
    }
    error_clear(error);
    return BHVD_OK;
}

// Copies on the device of `from`.
static int copy_there(struct bhvd_device_array *to, struct bhvd_device_array *from)
{
    struct bhvd_device *device = from->device;
    struct device_buffer *buffer;
    int failed = device_buffer_acquire(device, MEMORY_DEVICE, from->count * sizeof(float), &buffer);
    if (failed)
        return failed;
    failed = device->ops->stream_wait_event(device, device->to_host, from->buffer->last);
    failed = failed ?: device->ops->copy(device, buffer->data, from->buffer->data, from->count * sizeof(float), device->to_host);
    const int read = device_buffer_record(device, from->buffer, device->to_host);
    const int written = device_buffer_record(device, buffer, device->to_host);
    device_copy_adopt(to, device, buffer);
    return failed ?: read ? read : written;
}

bhvd_status bhvd_device_array_copy(bhvd_device_array *to, bhvd_device_array *from, struct bhvd_error *error)
{
    if (from->device) {
        int failed = copy_there(to, from);
        if (failed)
            return device_failed(from->device, failed, "the device copy of error states or replicas cannot be copied", error);
    } else {
        forget(to);
        memcpy(to->values, from->values, from->count * sizeof(float));
    }
    error_clear(error);
    return BHVD_OK;
}

// Copies the host's values to the device.
static int send(struct bhvd_device_array *device_copy, struct bhvd_device *device, void *stream, struct device_buffer *buffer)
{
    const size_t nbytes = device_copy->count * sizeof(float);
    struct device_buffer *pinned;
    int failed = device_buffer_acquire(device, MEMORY_PINNED, nbytes, &pinned);
    if (failed)
        return failed;
    memcpy(pinned->data, device_copy->values, nbytes);
    failed = device->ops->copy(device, buffer->data, pinned->data, nbytes, stream);
    const int recorded = device_buffer_record(device, pinned, stream);
    device_buffer_release(device, pinned);
    return failed ?: recorded;
}

int device_copy_use(struct bhvd_device_array *device_copy, struct bhvd_device *device, void *stream, float **out)
{
    if (device_copy->device && device_copy->device != device) {
        int failed = fetch(device_copy);
        if (failed)
            return failed;
        forget(device_copy);
    }
    if (!device_copy->device) {
        struct device_buffer *buffer;
        int failed = device_buffer_acquire(device, MEMORY_DEVICE, device_copy->count * sizeof(float), &buffer);
        if (failed)
            return failed;
        failed = send(device_copy, device, stream, buffer);
        const int recorded = device_buffer_record(device, buffer, stream);
        device_copy_adopt(device_copy, device, buffer);
        if (failed || recorded)
            return failed ?: recorded;
    }
    *out = (float *)(void *)device_copy->buffer->data;
    return device->ops->stream_wait_event(device, stream, device_copy->buffer->last);
}

int device_copy_use_end(struct bhvd_device_array *device_copy, void *stream)
{
    return device_buffer_record(device_copy->device, device_copy->buffer, stream);
}

void device_copy_adopt(struct bhvd_device_array *device_copy, struct bhvd_device *device, struct device_buffer *buffer)
{
    device_hold(device);
    forget(device_copy);
    device_copy->device = device;
    device_copy->buffer = buffer;
}
