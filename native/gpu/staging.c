#include "gpu/staging.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/size.h"
#include "base/status.h"
#include "device/buffer.h"

enum { SMALL_BYTES = 1 << 20 };         // below, packing is faster than starting a copy; above, it takes too much memory

static bool is_small(const struct tensor *tensor) { return tensor->nbytes < SMALL_BYTES; }
static bool allocates_result(bhvd_kind kind) { return kind == BHVD_ALLGATHER || kind == BHVD_ALLTOALL; }

// Bytes of the longest part of a reducescatter.
static size_t part_nbytes(const struct tensor *tensor, int set_size)
{
    return (size_t)(tensor->dim0 / set_size + 1) * tensor->row_nbytes;
}

// Assigns offsets in the buffer to tensors and results: the same for both, except in a reducescatter. Small tensors come first.
static void lay_out(struct collective *coll, int set_size, unsigned char *at)
{
    for (int small = 1; small >= 0; small--) {
        for (size_t t = 0; t < coll->args.tensor_count; t++) {
            struct tensor *tensor = &coll->tensors[t];
            if (is_small(tensor) != small)
                continue;
            unsigned char *const src = at;
            at += size_round_up(tensor->nbytes, CACHE_LINE);
            tensor->src = src;
            if (tensor->dst && !coll->staging->tensors[t].dst_on_host)
                tensor->dst = coll->args.kind == BHVD_REDUCESCATTER ? at : allocates_result(coll->args.kind) ? NULL : src;
            if (coll->args.kind == BHVD_REDUCESCATTER)
                at += size_round_up(part_nbytes(tensor, set_size), CACHE_LINE);
            coll->staging->small_count += (size_t)small;
        }
        if (small)
            coll->staging->small_nbytes = (size_t)(at - coll->staging->buffer->data);
    }
}

static int copy_over_link(struct device_scratch *scratch, void *device, void *pinned, size_t nbytes, bool to_host)
{
    return scratch->device->ops->copy(scratch->device, to_host ? pinned : device, to_host ? device : pinned, nbytes,
                                      scratch->stream);
}

// Copies one tensor out, or its result back. packed: all small tensors on the device, as laid out in pinned memory; NULL: none.
static int copy_one(const struct collective *coll, size_t t, bool to_host, unsigned char *packed, struct device_copies *copies)
{
    const struct tensor *tensor = &coll->tensors[t];
    const struct staged_tensor *staged = &coll->staging->tensors[t];
    void *device = to_host ? (void *)(uintptr_t)staged->src : staged->dst;
    unsigned char *pinned = to_host ? (unsigned char *)(uintptr_t)tensor->src : tensor->dst;
    const bool resized = !to_host && (coll->args.kind == BHVD_REDUCESCATTER || allocates_result(coll->args.kind));
    const size_t nbytes = resized ? tensor->result_nbytes : tensor->nbytes;
    if (!nbytes || (!to_host && (!staged->dst || staged->dst_on_host)))
        return 0;
    if (!packed || !is_small(tensor))
        return copy_over_link(copies->scratch, device, pinned, nbytes, to_host);
    packed += pinned - coll->staging->buffer->data;
    return device_copies_add(copies, to_host ? packed : device, to_host ? device : packed, nbytes);
}

static int copy_all(const struct collective *coll, struct device_scratch *scratch, bool to_host)
{
    const struct staging *staging = coll->staging;
    // Results that the core allocated are outside the pinned memory, so each is copied back separately.
    const bool packs = device_copies_launch(scratch->device, staging->small_count) &&
                       (to_host || !allocates_result(coll->args.kind));
    struct device_copies copies;
    void *packed = NULL;
    int failed = device_copies_begin(&copies, scratch, staging->small_count);
    if (!failed && packs)
        failed = device_scratch_acquire(scratch, staging->small_nbytes, &packed);
    if (!failed && packs && !to_host)
        failed = copy_over_link(scratch, packed, staging->buffer->data, staging->small_nbytes, false);
    for (size_t t = 0; t < coll->args.tensor_count && !failed; t++)
        failed = copy_one(coll, t, to_host, packed, &copies);
    failed = device_copies_end(&copies, failed);
    if (!failed && packs && to_host)
        failed = copy_over_link(scratch, packed, staging->buffer->data, staging->small_nbytes, true);
    return device_scratch_release(scratch, failed);
}

static int start(struct collective *coll, bool is_read)
{
    struct bhvd_device *device = coll->staging->device;
    const struct device_ops *ops = device->ops;
    struct device_buffer *buffer = coll->staging->buffer;
    struct device_scratch scratch = {device, device->to_host, NULL};
    int failed = ops->event_record(device, buffer->ready, coll->args.stream);
    if (coll->staging->direct)
        return failed;
    failed = failed ?: ops->stream_wait_event(device, device->to_host, buffer->ready);
    if (!failed && is_read)
        failed = copy_all(coll, &scratch, true);
    failed = failed ?: ops->event_record(device, buffer->ready, device->to_host);
    if (!failed)
        buffer->last = buffer->ready;
    return failed;
}

bhvd_status staging_open(struct collective *coll, size_t nbytes, unsigned char **out, struct bhvd_error *error)
{
    const struct bhvd_args *args = &coll->args;
    struct bhvd_device *device = args->gpu;
    char posted[256];
    snprintf(posted, sizeof posted, "'%.200s' was posted", args->name);
    bhvd_status status = device_check_capture(device, args->stream, posted, error);
    if (status)
        return status;
    struct staging *staging = calloc(1, sizeof *staging + args->tensor_count * sizeof staging->tensors[0]);
    if (!staging)
        return error_set(error, BHVD_ERR_SYSTEM, "no memory for operation '%s'", args->name);
    staging->device = device;
    for (size_t t = 0; t < args->tensor_count; t++)
        staging->tensors[t] = (struct staged_tensor){args->tensors[t].src, args->tensors[t].dst,
                                                     args->tensors[t].dst_on_host != 0, NULL};
    int failed = device_buffer_acquire(device, MEMORY_PINNED, nbytes, &staging->buffer);
    if (failed) {
        free(staging);
        return device_failed(device, failed, "cannot allocate pinned memory", error);
    }
    device_hold(device);
    *out = staging->buffer->data;
    coll->staging = staging;
    return BHVD_OK;
}

bhvd_status staging_create(struct collective *coll, int set_size, int rank, bool direct, struct bhvd_error *error)
{
    size_t nbytes = 0;
    for (size_t t = 0; t < coll->args.tensor_count && !direct; t++) {
        const struct tensor *tensor = &coll->tensors[t];
        nbytes += size_round_up(tensor->nbytes, CACHE_LINE);
        if (coll->args.kind == BHVD_REDUCESCATTER)
            nbytes += size_round_up(part_nbytes(tensor, set_size), CACHE_LINE);
    }
    unsigned char *at;
    bhvd_status status = staging_open(coll, nbytes, &at, error);
    if (status)
        return status;
    coll->staging->direct = direct;
    if (!direct)
        lay_out(coll, set_size, at);
    int failed = start(coll, coll->args.kind != BHVD_BROADCAST || coll->args.root_rank == rank);
    return failed ? device_failed(coll->args.gpu, failed, "the tensors cannot be copied to the host", error) : BHVD_OK;
}

int staging_is_ready(const struct staging *staging, struct bhvd_error *error)
{
    struct bhvd_device *device = staging->device;
    if (staging->direct && !staging->host_waits)
        return 1;
    int failed = device->ops->event_query(device, staging->buffer->ready);
    if (failed == DEVICE_NOT_READY)
        return 0;
    if (!failed)
        return 1;
    device_failed(device, failed, "the tensors could not be copied to the host", error);
    return -1;
}

bhvd_status staging_end(struct collective *coll, struct bhvd_error *error)
{
    struct staging *staging = coll->staging;
    struct bhvd_device *device = staging->device;
    struct device_scratch scratch = {device, device->from_host, NULL};
    if (staging->by_nccl)               // NCCL writes the results
        return BHVD_OK;
    int failed = coll->args.kind != BHVD_D_LP_S || collective_mixes(coll->args.after + 1) ? copy_all(coll, &scratch, false) : 0;
    failed = failed ?: device_buffer_record(device, staging->buffer, device->from_host);
    return failed ? device_failed(device, failed, "the results cannot be copied to the GPU", error) : BHVD_OK;
}

void staging_destroy(struct collective *coll)
{
    struct staging *staging = coll->staging;
    if (!staging)
        return;
    device_buffer_release(staging->device, staging->buffer);
    for (size_t t = 0; t < coll->args.tensor_count; t++)
        device_buffer_release(staging->device, staging->tensors[t].result);
    bhvd_device_drop(staging->device);
    free(staging);
}

bhvd_status staging_join(const struct staging *staging, void *stream, struct bhvd_error *error)
{
    struct bhvd_device *device = staging->device;
    bhvd_status status = device_check_capture(device, stream, "an operation was waited for", error);
    if (status)
        return status;
    int failed = device->ops->stream_wait_event(device, stream, staging->buffer->done);
    return failed ? device_failed(device, failed, "the framework's stream cannot wait for the results", error) : BHVD_OK;
}

bhvd_status staging_copy_result(const struct collective *coll, size_t index, void *dst, void *stream, struct bhvd_error *error)
{
    struct device_buffer *result = coll->staging && index < coll->args.tensor_count ? coll->staging->tensors[index].result : NULL;
    if (!result)
        return error_set(error, BHVD_ERR_ARGUMENT, "the operation has no result %zu on a GPU", index);
    struct bhvd_device *device = coll->staging->device;
    bhvd_status status = device_check_capture(device, stream, "a result was copied", error);
    if (status)
        return status;
    int failed = device->ops->copy(device, dst, result->data, coll->tensors[index].result_nbytes, stream);
    failed = failed ?: device_buffer_record(device, result, stream);
    return failed ? device_failed(device, failed, "a result cannot be copied", error) : BHVD_OK;
}
