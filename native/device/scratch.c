#include "device/scratch.h"

enum { LAUNCH_FROM = 4 };               // copies; from this number on, one launch is cheaper

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
        code = code ? code : recorded;
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
    if (!code)
        code = device->ops->copy(device, table, copies->spans, nbytes, stream);
    return code ? code : device_launch(device, BHVD_DEVICE_COPY_SPANS, 0, copies->pieces, params, stream);
}
