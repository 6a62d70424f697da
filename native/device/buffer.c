#include "device/buffer.h"

#include <stdlib.h>

#include "base/size.h"

enum {
    BUFFER_SMALLEST = 1 << 16,
    LAUNCH_FROM = 4                     // copies; from this number on, one launch is cheaper
};

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
    code = code ?: device->ops->event_create(device, &buffer->ready);
    code = code ?: device->ops->event_create(device, &buffer->done);
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

// ----------------------------------------------------------------------------------------------------------- scratch

int device_scratch_buffer(struct device_scratch *scratch, enum device_memory memory, size_t nbytes, struct device_buffer **out)
{
    int code = device_buffer_acquire(scratch->device, memory, nbytes, out);
    if (code)
        return code;
    (*out)->next = scratch->used;
    scratch->used = *out;
    return 0;
}

int device_scratch_acquire(struct device_scratch *scratch, size_t nbytes, void **out)
{
    struct device_buffer *buffer;
    int code = device_scratch_buffer(scratch, MEMORY_DEVICE, nbytes, &buffer);
    *out = code ? NULL : buffer->data;
    return code;
}

int device_scratch_release(struct device_scratch *scratch, int code)
{
    for (struct device_buffer *buffer = scratch->used, *next; buffer; buffer = next) {
        next = buffer->next;
        const int recorded = device_buffer_record(scratch->device, buffer, scratch->stream);
        code = code ?: recorded;
        device_buffer_release(scratch->device, buffer);
    }
    scratch->used = NULL;
    return code;
}

bool device_copies_launch(const struct bhvd_device *device, size_t count)
{
    return count >= LAUNCH_FROM && device_kernel(device, BHVD_DEVICE_COPY_SPANS, 0);
}

int device_copies_begin(struct device_copies *copies, struct device_scratch *scratch, size_t most)
{
    struct device_buffer *pinned;
    *copies = (struct device_copies){.scratch = scratch};
    if (!device_copies_launch(scratch->device, most))
        return 0;
    int code = device_scratch_buffer(scratch, MEMORY_PINNED, most * sizeof *copies->spans, &pinned);
    copies->spans = code ? NULL : (struct device_span *)(void *)pinned->data;
    return code;
}

int device_copies_add(struct device_copies *copies, void *dst, const void *src, size_t nbytes)
{
    struct bhvd_device *device = copies->scratch->device;
    if (!nbytes)
        return 0;
    if (!copies->spans)
        return device->ops->copy(device, dst, src, nbytes, copies->scratch->stream);
    copies->spans[copies->count++] = (struct device_span){src, dst, nbytes, copies->pieces};
    copies->pieces += (nbytes + SPANS_PIECE - 1) / SPANS_PIECE;
    return 0;
}

int device_copies_end(struct device_copies *copies, int code)
{
    struct bhvd_device *device = copies->scratch->device;
    void *stream = copies->scratch->stream, *table, *params[] = {&table, &copies->count};
    const size_t nbytes = copies->count * sizeof *copies->spans;
    if (code || !copies->count)
        return code;
    code = device_scratch_acquire(copies->scratch, nbytes, &table);
    code = code ?: device->ops->copy(device, table, copies->spans, nbytes, stream);
    return code ?: device_launch(device, BHVD_DEVICE_COPY_SPANS, 0, copies->pieces, params, stream);
}
