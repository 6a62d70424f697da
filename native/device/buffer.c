#include "device/buffer.h"

#include <stdlib.h>

#include "base/size.h"

enum { BUFFER_SMALLEST = 1 << 16 };

static void buffer_free(struct bhvd_device *device, struct device_buffer *buffer)
{
    if (buffer->ready)
        device->ops->event_destroy(device, buffer->ready);
    if (buffer->done)
        device->ops->event_destroy(device, buffer->done);
    if (buffer->data)
        device->ops->memory_free(device, buffer->memory, buffer->data);
    free(buffer);
}

static int buffer_create(struct bhvd_device *device, enum device_memory memory, size_t size, struct device_buffer **out)
{
    struct device_buffer *buffer = calloc(1, sizeof *buffer);
    *out = buffer;
    if (!buffer)
        return DEVICE_NO_MEMORY;
    buffer->memory = memory;
    buffer->size = size;
    void *data = NULL;
    int code = device->ops->memory_allocate(device, memory, size, &data);
    buffer->data = data;
    if (!code)
        code = device->ops->event_create(device, &buffer->ready);
    if (!code)
        code = device->ops->event_create(device, &buffer->done);
    if (code) {
        buffer_free(device, buffer);
        *out = NULL;
    }
    return code;
}

int device_buffer_acquire(struct bhvd_device *device, enum device_memory memory, size_t nbytes,
                          struct device_buffer **out)
{
    const size_t size = size_double_up(nbytes, BUFFER_SMALLEST);
    pthread_mutex_lock(&device->lock);
    struct device_buffer **at = &device->free_buffers;
    while (*at && ((*at)->memory != memory || (*at)->size != size ||
                   ((*at)->last && device->ops->event_query(device, (*at)->last))))
        at = &(*at)->next;
    struct device_buffer *found = *at;
    if (found)
        *at = found->next;
    pthread_mutex_unlock(&device->lock);
    if (!found)
        return buffer_create(device, memory, size, out);
    found->last = NULL;
    *out = found;
    return 0;
}

void device_buffer_release(struct bhvd_device *device, struct device_buffer *buffer)
{
    if (!buffer)
        return;
    pthread_mutex_lock(&device->lock);
    buffer->next = device->free_buffers;
    device->free_buffers = buffer;
    pthread_mutex_unlock(&device->lock);
}

void device_buffers_free(struct bhvd_device *device)
{
    for (struct device_buffer *buffer = device->free_buffers, *next; buffer; buffer = next) {
        next = buffer->next;
        if (buffer->last)
            device->ops->event_wait(device, buffer->last);
        buffer_free(device, buffer);
    }
}

int device_buffer_record(struct bhvd_device *device, struct device_buffer *buffer, void *stream)
{
    buffer->last = buffer->done;
    return device->ops->event_record(device, buffer->done, stream);
}
