#include "gpu/mirror.h"

#include <stdlib.h>
#include <string.h>

#include "base/status.h"
#include "device/buffer.h"

bhvd_mirror *bhvd_mirror_create(float *values, size_t count)
{
    bhvd_mirror *mirror = calloc(1, sizeof *mirror);
    if (mirror)
        *mirror = (struct bhvd_mirror){.values = values, .count = count};
    return mirror;
}

static void forget(struct bhvd_mirror *mirror)
{
    if (!mirror->device)
        return;
    device_buffer_release(mirror->device, mirror->buffer);
    bhvd_device_drop(mirror->device);
    mirror->device = NULL;
    mirror->buffer = NULL;
}

void bhvd_mirror_destroy(bhvd_mirror *mirror)
{
    if (!mirror)
        return;
    forget(mirror);
    free(mirror);
}

static int fetch(struct bhvd_mirror *mirror)
{
    struct bhvd_device *device = mirror->device;
    const struct device_ops *ops = device->ops;
    int code = ops->stream_wait_event(device, device->to_host, mirror->buffer->last);
    if (!code)
        code = ops->copy(device, mirror->values, mirror->buffer->data, mirror->count * sizeof(float), device->to_host);
    if (!code)
        code = device_buffer_record(device, mirror->buffer, device->to_host);
    return code ? code : ops->event_wait(device, mirror->buffer->done);
}

bhvd_status bhvd_mirror_fetch(bhvd_mirror *mirror, struct bhvd_error *error)
{
    if (mirror->device) {
        int code = fetch(mirror);
        if (code)
            return device_failed(mirror->device, code, "errors to be fed back cannot be read", error);
        forget(mirror);
    }
    error_clear(error);
    return BHVD_OK;
}

// Both on the device of `from`.
static int copy_there(struct bhvd_mirror *to, struct bhvd_mirror *from)
{
    struct bhvd_device *device = from->device;
    struct device_buffer *buffer;
    int code = device_buffer_acquire(device, MEMORY_DEVICE, from->count * sizeof(float), &buffer);
    if (code)
        return code;
    code = device->ops->stream_wait_event(device, device->to_host, from->buffer->last);
    if (!code)
        code = device->ops->copy(device, buffer->data, from->buffer->data, from->count * sizeof(float), device->to_host);
    const int read = device_buffer_record(device, from->buffer, device->to_host);
    const int written = device_buffer_record(device, buffer, device->to_host);
    mirror_adopt(to, device, buffer);
    return code ? code : read ? read : written;
}

bhvd_status bhvd_mirror_copy(bhvd_mirror *to, bhvd_mirror *from, struct bhvd_error *error)
{
    if (from->device) {
        int code = copy_there(to, from);
        if (code)
            return device_failed(from->device, code, "errors to be fed back cannot be copied", error);
    } else {
        forget(to);
        memcpy(to->values, from->values, from->count * sizeof(float));
    }
    error_clear(error);
    return BHVD_OK;
}

// The host's values to the device.
static int send(struct bhvd_mirror *mirror, struct bhvd_device *device, void *stream, struct device_buffer *buffer)
{
    const size_t nbytes = mirror->count * sizeof(float);
    struct device_buffer *pinned;
    int code = device_buffer_acquire(device, MEMORY_PINNED, nbytes, &pinned);
    if (code)
        return code;
    memcpy(pinned->data, mirror->values, nbytes);
    code = device->ops->copy(device, buffer->data, pinned->data, nbytes, stream);
    const int recorded = device_buffer_record(device, pinned, stream);
    device_buffer_release(device, pinned);
    return code ? code : recorded;
}

int mirror_read(struct bhvd_mirror *mirror, struct bhvd_device *device, void *stream, const float **out)
{
    if (mirror->device && mirror->device != device) {
        int code = fetch(mirror);
        if (code)
            return code;
        forget(mirror);
    }
    if (!mirror->device) {
        struct device_buffer *buffer;
        int code = device_buffer_acquire(device, MEMORY_DEVICE, mirror->count * sizeof(float), &buffer);
        if (code)
            return code;
        code = send(mirror, device, stream, buffer);
        const int recorded = device_buffer_record(device, buffer, stream);
        mirror_adopt(mirror, device, buffer);
        if (code || recorded)
            return code ? code : recorded;
    }
    *out = (const float *)(const void *)mirror->buffer->data;
    return device->ops->stream_wait_event(device, stream, mirror->buffer->last);
}

int mirror_change(struct bhvd_mirror *mirror, struct bhvd_device *device, void *stream, float **out)
{
    const float *values;
    int code = mirror_read(mirror, device, stream, &values);
    if (!code)
        *out = (float *)(void *)mirror->buffer->data;
    return code;
}

int mirror_read_end(struct bhvd_mirror *mirror, void *stream)
{
    return device_buffer_record(mirror->device, mirror->buffer, stream);
}

void mirror_adopt(struct bhvd_mirror *mirror, struct bhvd_device *device, struct device_buffer *buffer)
{
    device_hold(device);
    forget(mirror);
    mirror->device = device;
    mirror->buffer = buffer;
}
