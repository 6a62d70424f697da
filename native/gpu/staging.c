#include "gpu/staging.h"

#include <stdlib.h>
#include <string.h>

#include "base/status.h"
#include "device/buffer.h"

enum { ALIGNMENT = 64 };                // of each tensor in a buffer: whole cache lines, and vectors in kernels

static size_t aligned(size_t nbytes) { return (nbytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT; }
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
static size_t lay_out(struct work *op, const struct bhvd_args *args, int set_size, bool is_read, unsigned char *at)
{
    const struct staging *staging = op->staging;
    size_t copies = 0;
    if (staging->direct)
        return 0;
    for (size_t t = 0; t < op->tensor_count; t++) {
        struct tensor *tensor = &op->tensors[t];
        const bool separate = op->kind == BHVD_REDUCESCATTER;
        if (tensor->nbytes && is_read)
            staging->table[copies++] = (struct device_span){tensor->src, at, tensor->nbytes, 0};
        tensor->src = at;
        if (tensor->dst && !args->tensors[t].dst_on_host)
            tensor->dst = separate ? at + aligned(tensor->nbytes) : at;
        at += aligned(tensor->nbytes) + (separate ? aligned(part_nbytes(tensor, set_size)) : 0);
    }
    return copies;
}

static int start(struct work *op, const struct bhvd_args *args, int set_size, bool is_read, unsigned char *at)
{
    struct bhvd_device *device = args->gpu;
    const struct device_ops *ops = device->ops;
    struct device_buffer *buffer = op->staging->buffer;
    const size_t copies = lay_out(op, args, set_size, is_read, at);
    int code = ops->event_record(device, buffer->ready, args->stream);
    if (op->staging->direct)
        return code;
    if (!code)
        code = ops->stream_wait_event(device, device->to_host, buffer->ready);
    if (!code)
        code = device_copy_spans(device, op->staging->table, copies, device->to_host);
    if (!code)
        code = ops->event_record(device, buffer->ready, device->to_host);
    if (!code)
        buffer->last = buffer->ready;
    return code;
}

bhvd_status staging_open(struct work *op, const struct bhvd_args *args, size_t nbytes, unsigned char **out,
                         struct bhvd_error *error)
{
    struct bhvd_device *device = args->gpu;
    const size_t table = aligned(op->tensor_count * sizeof(struct device_span));
    bhvd_status status = check(args, error);
    if (status)
        return status;
    struct staging *staging = calloc(1, sizeof *staging + op->tensor_count * sizeof staging->places[0]);
    if (!staging)
        return error_set(error, BHVD_ERR_SYSTEM, "no memory for operation '%s'", args->name);
    staging->device = device;
    staging->count = op->tensor_count;
    for (size_t t = 0; t < op->tensor_count; t++)
        staging->places[t] = (struct staging_place){args->tensors[t].src, args->tensors[t].dst,
                                                    args->tensors[t].dst_on_host != 0, NULL};
    int code = device_buffer_acquire(device, MEMORY_PINNED, table + nbytes, &staging->buffer);
    if (code) {
        free(staging);
        return device_failed(device, code, "pinned memory cannot be had", error);
    }
    device_hold(device);
    staging->table = (struct device_span *)(void *)staging->buffer->data;
    *out = staging->buffer->data + table;
    op->staging = staging;
    return BHVD_OK;
}

bhvd_status staging_create(struct work *op, const struct bhvd_args *args, int set_size, int rank, bool direct,
                           struct bhvd_error *error)
{
    size_t nbytes = 0;
    for (size_t t = 0; t < op->tensor_count && !direct; t++) {
        const struct tensor *tensor = &op->tensors[t];
        nbytes += aligned(tensor->nbytes);
        if (op->kind == BHVD_REDUCESCATTER)
            nbytes += aligned(part_nbytes(tensor, set_size));
    }
    unsigned char *at;
    bhvd_status status = staging_open(op, args, nbytes, &at, error);
    if (status)
        return status;
    op->staging->direct = direct;
    int code = start(op, args, set_size, op->kind != BHVD_BROADCAST || args->root_rank == rank, at);
    return code ? device_failed(args->gpu, code, "the tensors cannot be copied to the host", error) : BHVD_OK;
}

int staging_is_ready(const struct staging *staging, struct bhvd_error *error)
{
    struct bhvd_device *device = staging->device;
    if (staging->direct && !staging->host_waits)
        return 1;
    int code = device->ops->event_query(device, staging->buffer->ready);
    if (code == DEVICE_NOT_READY)
        return 0;
    if (!code)
        return 1;
    device_failed(device, code, "the tensors could not be copied to the host", error);
    return -1;
}

bhvd_status staging_end(struct work *op, struct bhvd_error *error)
{
    struct staging *staging = op->staging;
    struct bhvd_device *device = staging->device;
    struct device_buffer *buffer = staging->buffer;
    size_t copies = 0;
    if (staging->by_nccl)               // which writes the results
        return BHVD_OK;
    for (size_t t = 0; t < staging->count && (op->kind != BHVD_D_LP_S || op->mixes_after); t++) {
        const struct tensor *tensor = &op->tensors[t];
        const struct staging_place *place = &staging->places[t];
        const size_t nbytes = op->kind == BHVD_REDUCESCATTER ? tensor->result_nbytes : tensor->nbytes;
        if (place->dst && !place->dst_on_host && nbytes)
            staging->table[copies++] = (struct device_span){tensor->dst, place->dst, nbytes, 0};
    }
    int code = device_copy_spans(device, staging->table, copies, device->from_host);
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
    device_buffer_release(staging->device, staging->buffer);
    for (size_t t = 0; t < staging->count; t++)
        device_buffer_release(staging->device, staging->places[t].result);
    bhvd_device_drop(staging->device);
    free(staging);
}

bhvd_status staging_join(const struct staging *staging, void *stream, struct bhvd_error *error)
{
    struct bhvd_device *device = staging->device;
    int code = device->ops->stream_wait_event(device, stream, staging->buffer->done);
    return code ? device_failed(device, code, "the framework's stream cannot wait for the results", error) : BHVD_OK;
}

bhvd_status staging_copy_result(const struct work *op, size_t index, void *dst, void *stream, struct bhvd_error *error)
{
    struct device_buffer *result = op->staging && index < op->tensor_count ? op->staging->places[index].result : NULL;
    if (!result)
        return error_set(error, BHVD_ERR_ARGUMENT, "the operation has no result %zu on a GPU", index);
    struct bhvd_device *device = op->staging->device;
    int code = device->ops->copy(device, dst, result->data, op->tensors[index].result_nbytes, stream);
    if (!code)
        code = device->ops->event_record(device, result->done, stream);
    if (code)
        return device_failed(device, code, "a result cannot be copied", error);
    result->last = result->done;
    return BHVD_OK;
}
