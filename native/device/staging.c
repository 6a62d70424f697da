#include "device/staging.h"

#include <stdlib.h>
#include <string.h>

#include "base/status.h"

enum {
    ALIGNMENT = 64,                     // of each tensor in a buffer: whole cache lines, and vectors in kernels
    BUFFER_SMALLEST = 1 << 16,
    LAUNCH_FROM = 4                     // tensors: so many copies cost more than a launch
};

// Pinned memory, and the events of what the GPU does with it. Sizes are powers of two, so that few serve all.
struct staging_buffer {
    struct staging_buffer *next;
    unsigned char *data;
    size_t size;
    void *ready, *done;
    void *last;                         // the event after which nobody uses it; NULL: none was recorded
};

struct staging {
    struct bhvd_device *device;
    struct staging_buffer *buffer;
    struct device_span *table;          // inside the buffer
    size_t count;
    void *targets[];                    // for each tensor, where its result belongs on the device; NULL: nowhere
};

// ---------------------------------------------------------------------------------------------------------- buffers

static void buffer_free(struct bhvd_device *device, struct staging_buffer *buffer)
{
    if (buffer->ready)
        device->ops->event_destroy(device, buffer->ready);
    if (buffer->done)
        device->ops->event_destroy(device, buffer->done);
    if (buffer->data)
        device->ops->pinned_free(device, buffer->data);
    free(buffer);
}

static int buffer_create(struct bhvd_device *device, size_t size, struct staging_buffer **out)
{
    struct staging_buffer *buffer = calloc(1, sizeof *buffer);
    *out = buffer;
    if (!buffer)
        return DEVICE_NO_MEMORY;
    buffer->size = size;
    void *data = NULL;
    int code = device->ops->pinned_allocate(device, size, &data);
    buffer->data = data;
    if (!code)
        code = device->ops->event_create(device, &buffer->ready);
    if (!code)
        code = device->ops->event_create(device, &buffer->done);
    if (code)
        buffer_free(device, buffer);
    return code;
}

// A free one of this size that the GPU is done with, else a new one.
static int buffer_acquire(struct bhvd_device *device, size_t nbytes, struct staging_buffer **out)
{
    size_t size = BUFFER_SMALLEST;
    while (size < nbytes)
        size *= 2;
    pthread_mutex_lock(&device->lock);
    struct staging_buffer **at = &device->free_buffers;
    while (*at && ((*at)->size != size || ((*at)->last && device->ops->event_query(device, (*at)->last))))
        at = &(*at)->next;
    struct staging_buffer *found = *at;
    if (found)
        *at = found->next;
    pthread_mutex_unlock(&device->lock);
    if (!found)
        return buffer_create(device, size, out);
    found->last = NULL;
    *out = found;
    return 0;
}

static void buffer_release(struct bhvd_device *device, struct staging_buffer *buffer)
{
    pthread_mutex_lock(&device->lock);
    buffer->next = device->free_buffers;
    device->free_buffers = buffer;
    pthread_mutex_unlock(&device->lock);
}

void staging_free_buffers(struct bhvd_device *device)
{
    for (struct staging_buffer *buffer = device->free_buffers, *next; buffer; buffer = next) {
        next = buffer->next;
        if (buffer->last)
            device->ops->event_wait(device, buffer->last);
        buffer_free(device, buffer);
    }
}

// ----------------------------------------------------------------------------------------------------------- copies

static size_t aligned(size_t nbytes) { return (nbytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT; }

// Copies the spans of the table: by one launch where there are many and the kernel is there.
static int copy_spans(struct bhvd_device *device, struct device_span *table, size_t count, void *stream)
{
    uint64_t pieces = 0;
    for (size_t i = 0; i < count; i++) {
        table[i].first_piece = pieces;
        pieces += (table[i].nbytes + SPANS_PIECE - 1) / SPANS_PIECE;
    }
    void *kernel = atomic_load(&device->kernels[BHVD_DEVICE_COPY_SPANS]);
    if (kernel && count >= LAUNCH_FROM && pieces <= INT32_MAX) {
        uint64_t spans = count;
        void *params[] = {&table, &spans};
        return device->ops->launch(device, kernel, (unsigned)pieces, SPANS_THREADS, params, stream);
    }
    int code = 0;
    for (size_t i = 0; i < count && !code; i++)
        code = device->ops->copy(device, table[i].dst, table[i].src, table[i].nbytes, stream);
    return code;
}

// --------------------------------------------------------------------------------------------------------- staging

static bool allocates_result(bhvd_kind kind) { return kind == BHVD_ALLGATHER || kind == BHVD_ALLTOALL; }

// Rows of the longest part of a reducescatter.
static size_t part_nbytes(const struct tensor *tensor, int set_size)
{
    return (size_t)(tensor->dim0 / set_size + 1) * tensor->row_nbytes;
}

static bhvd_status check(const struct bhvd_args *args, struct bhvd_error *error)
{
    int capturing = 0;
    int code = args->gpu->ops->stream_is_capturing(args->gpu, args->stream, &capturing);
    if (code)
        return device_failed(args->gpu, code, "the framework's stream cannot be used", error);
    if (capturing)
        return error_set(error, BHVD_ERR_UNSUPPORTED, "'%s' was posted while a CUDA graph is being captured: communication "
                         "on the host cannot be part of a graph, so end the capture before it", args->name);
    for (size_t t = 0; t < args->tensor_count; t++) {
        if (args->tensors[t].dst && !args->tensors[t].dst_on_host && allocates_result(args->kind))
            return error_set(error, BHVD_ERR_UNSUPPORTED, "the result of '%s' cannot be written to a GPU directly: post it "
                             "without dst, and copy what bhvd_result gives", args->name);
    }
    return BHVD_OK;
}

// Lays the tensors out in the buffer, and fills the table with what is to be copied out. Returns its length.
static size_t lay_out(struct bhvd_handle *op, const struct bhvd_args *args, int set_size, bool is_read)
{
    struct staging *staging = op->staging;
    unsigned char *at = staging->buffer->data;
    size_t copies = 0;
    staging->table = (struct device_span *)(void *)at;
    at += aligned(op->tensor_count * sizeof *staging->table);
    for (size_t t = 0; t < op->tensor_count; t++) {
        struct tensor *tensor = &op->tensors[t];
        const bool separate = op->kind == BHVD_REDUCESCATTER;
        if (tensor->nbytes && is_read)
            staging->table[copies++] = (struct device_span){tensor->src, at, tensor->nbytes, 0};
        tensor->src = at;
        if (tensor->dst && !args->tensors[t].dst_on_host) {
            staging->targets[t] = op->kind == BHVD_D_LP_S ? NULL : tensor->dst;     // which writes nothing
            tensor->dst = separate ? at + aligned(tensor->nbytes) : at;
        }
        at += aligned(tensor->nbytes) + (separate ? aligned(part_nbytes(tensor, set_size)) : 0);
    }
    return copies;
}

static int start(struct bhvd_handle *op, const struct bhvd_args *args, int set_size, bool is_read)
{
    struct bhvd_device *device = args->gpu;
    const struct device_ops *ops = device->ops;
    struct staging_buffer *buffer = op->staging->buffer;
    const size_t copies = lay_out(op, args, set_size, is_read);
    int code = ops->event_record(device, buffer->ready, args->stream);
    if (!code)
        code = ops->stream_wait_event(device, device->to_host, buffer->ready);
    if (!code)
        code = copy_spans(device, op->staging->table, copies, device->to_host);
    if (!code)
        code = ops->event_record(device, buffer->ready, device->to_host);
    if (!code)
        buffer->last = buffer->ready;
    return code;
}

bhvd_status staging_create(struct bhvd_handle *op, const struct bhvd_args *args, int set_size, int rank,
                           struct bhvd_error *error)
{
    struct bhvd_device *device = args->gpu;
    size_t nbytes = aligned(op->tensor_count * sizeof(struct device_span));
    for (size_t t = 0; t < op->tensor_count; t++) {
        const struct tensor *tensor = &op->tensors[t];
        nbytes += aligned(tensor->nbytes);
        if (op->kind == BHVD_REDUCESCATTER)
            nbytes += aligned(part_nbytes(tensor, set_size));
    }
    bhvd_status status = check(args, error);
    if (status)
        return status;
    struct staging *staging = calloc(1, sizeof *staging + op->tensor_count * sizeof staging->targets[0]);
    if (!staging)
        return error_set(error, BHVD_ERR_SYSTEM, "no memory for operation '%s'", args->name);
    staging->device = device;
    staging->count = op->tensor_count;
    int code = buffer_acquire(device, nbytes, &staging->buffer);
    if (code) {
        free(staging);
        return device_failed(device, code, "pinned memory cannot be had", error);
    }
    device_hold(device);
    op->staging = staging;
    code = start(op, args, set_size, op->kind != BHVD_BROADCAST || args->root_rank == rank);
    return code ? device_failed(device, code, "the tensors cannot be copied to the host", error) : BHVD_OK;
}

int staging_is_ready(const struct staging *staging, struct bhvd_error *error)
{
    struct bhvd_device *device = staging->device;
    int code = device->ops->event_query(device, staging->buffer->ready);
    if (code == DEVICE_NOT_READY)
        return 0;
    if (!code)
        return 1;
    device_failed(device, code, "the tensors could not be copied to the host", error);
    return -1;
}

bhvd_status staging_end(struct bhvd_handle *op, struct bhvd_error *error)
{
    struct staging *staging = op->staging;
    struct bhvd_device *device = staging->device;
    struct staging_buffer *buffer = staging->buffer;
    size_t copies = 0;
    for (size_t t = 0; t < staging->count; t++) {
        const struct tensor *tensor = &op->tensors[t];
        const size_t nbytes = op->kind == BHVD_REDUCESCATTER ? tensor->result_nbytes : tensor->nbytes;
        if (staging->targets[t] && nbytes)
            staging->table[copies++] = (struct device_span){tensor->dst, staging->targets[t], nbytes, 0};
    }
    int code = copy_spans(device, staging->table, copies, device->from_host);
    if (!code)
        code = device->ops->event_record(device, buffer->done, device->from_host);
    if (code)
        return device_failed(device, code, "the results cannot be copied to the GPU", error);
    buffer->last = buffer->done;
    return BHVD_OK;
}

void staging_destroy(struct staging *staging)
{
    if (!staging)
        return;
    buffer_release(staging->device, staging->buffer);
    bhvd_device_drop(staging->device);
    free(staging);
}

bhvd_status bhvd_handle_join(bhvd_handle *op, void *stream, struct bhvd_error *error)
{
    if (!bhvd_poll(op))
        return error_set(error, BHVD_ERR_ARGUMENT, "the operation has not ended: wait for it first");
    struct staging *staging = op->staging;
    if (op->error.status || !staging)
        return op->error.status;
    struct bhvd_device *device = staging->device;
    int code = device->ops->stream_wait_event(device, stream, staging->buffer->done);
    return code ? device_failed(device, code, "the framework's stream cannot wait for the results", error) : BHVD_OK;
}
