// An execution by NCCL: begin, end, and helpers for its collectives (nccl_execution.h).
#include "gpu/nccl_execution.h"

#include <stdlib.h>

#include "base/clock.h"

// ---------------------------------------------------------------------------------------------------------- errors

bhvd_status nccl_execution_checked(struct nccl_execution *x, int failed)
{
    struct bhvd_error error;
    if (!failed)
        return BHVD_OK;
    device_failed(x->device, failed, "NCCL's streams cannot be used", &error);
    return executor_fail(x->exec, error.status, "rank %d: %s", x->exec->connections.rank, error.message);
}

// For a call outside a group, or the end of a group.
bhvd_status nccl_execution_enqueued(struct nccl_execution *x, nccl_result result)
{
    if (result != NCCL_SUCCESS && result != NCCL_IN_PROGRESS)
        return nccl_failed(x->exec, x->comm, result, "a collective cannot be started");
    return result == NCCL_IN_PROGRESS ? nccl_settle(x->exec, x->comm) : BHVD_OK;
}

// Keeps the first error of a group.
void nccl_execution_keep(nccl_result *kept, nccl_result result)
{
    if (*kept == NCCL_SUCCESS && result != NCCL_SUCCESS && result != NCCL_IN_PROGRESS)
        *kept = result;
}

bhvd_status nccl_execution_group_end(struct nccl_execution *x, nccl_result inside)
{
    nccl_result result = x->nccl->group_end();
    return nccl_execution_enqueued(x, inside ? inside : result);
}

static int has_passed(struct executor *exec, void *arg)
{
    void **device_and_event = arg;
    struct bhvd_device *device = device_and_event[0];
    (void)exec;
    return device->ops->event_query(device, device_and_event[1]) != DEVICE_NOT_READY;
}

bhvd_status nccl_execution_wait(struct nccl_execution *x, void *event)
{
    void *device_and_event[] = {x->device, event};
    bhvd_status status = executor_wait_gpu(x->exec, has_passed, device_and_event);
    return status ? status : nccl_execution_checked(x, x->device->ops->event_query(x->device, event));
}

bhvd_status nccl_execution_copy(struct nccl_execution *x, void *dst, const void *src, size_t nbytes)
{
    return nbytes ? nccl_execution_checked(x, x->device->ops->copy(x->device, dst, src, nbytes, x->stream)) : BHVD_OK;
}

// --------------------------------------------------------------------------------------------------------- numbers

enum nccl_type nccl_execution_type(bhvd_dtype dtype)
{
    switch (dtype) {
    case BHVD_INT8: return NCCL_INT8;
    case BHVD_INT32: return NCCL_INT32;
    case BHVD_INT64: return NCCL_INT64;
    case BHVD_FLOAT16: return NCCL_FLOAT16;
    case BHVD_FLOAT32: return NCCL_FLOAT32;
    case BHVD_FLOAT64: return NCCL_FLOAT64;
    case BHVD_BFLOAT16: return NCCL_BFLOAT16;
    default: return NCCL_UINT8;
    }
}

enum nccl_op nccl_execution_op(bhvd_op op)
{
    switch (op) {
    case BHVD_OP_MIN: return NCCL_MIN;
    case BHVD_OP_MAX: return NCCL_MAX;
    case BHVD_OP_PRODUCT: return NCCL_PROD;
    default: return NCCL_SUM;
    }
}

// ----------------------------------------------------------------------------------------------------------- parts

static size_t part_of(const struct nccl_parts *parts, int rank) { return parts->of ? parts->of[rank] : parts->each; }

// Whether NCCL's own collectives for equal parts apply.
static bool are_equal(const struct nccl_execution *x, const struct nccl_parts *parts)
{
    for (int i = 1; i < parts->count; i++)
        if (part_of(parts, i) != part_of(parts, 0))
            return false;
    return parts->count == x->set->size;
}

bhvd_status nccl_execution_reduce_scatter(struct nccl_execution *x, bhvd_op op, bhvd_dtype dtype, const unsigned char *src,
                                          void *dst, const struct nccl_parts *parts)
{
    const size_t element = bhvd_dtype_size(dtype);
    if (are_equal(x, parts))
        return nccl_execution_enqueued(x, x->nccl->reduce_scatter(src, dst, part_of(parts, 0) / element, nccl_execution_type(dtype),
                                                                  nccl_execution_op(op), x->comm->handle, x->stream));
    nccl_result inside = x->nccl->group_start();
    for (int i = 0; i < parts->count; src += part_of(parts, i++)) {
        if (part_of(parts, i))
            nccl_execution_keep(&inside, x->nccl->reduce(src, i == x->set->rank ? dst : NULL, part_of(parts, i) / element,
                                                         nccl_execution_type(dtype), nccl_execution_op(op), i, x->comm->handle,
                                                         x->stream));
    }
    return nccl_execution_group_end(x, inside);
}

bhvd_status nccl_execution_all_gather(struct nccl_execution *x, const void *src, unsigned char *dst, const struct nccl_parts *parts)
{
    if (are_equal(x, parts))
        return nccl_execution_enqueued(x, x->nccl->all_gather(src, dst, part_of(parts, 0), NCCL_UINT8, x->comm->handle, x->stream));
    nccl_result inside = x->nccl->group_start();
    for (int i = 0; i < parts->count; dst += part_of(parts, i++)) {
        if (part_of(parts, i))
            nccl_execution_keep(&inside, x->nccl->broadcast(i == x->set->rank ? src : dst, dst, part_of(parts, i), NCCL_UINT8, i,
                                                            x->comm->handle, x->stream));
    }
    return nccl_execution_group_end(x, inside);
}

// ------------------------------------------------------------------------------------------------- begin and end

bhvd_status nccl_begin(struct executor *exec, struct group *set, struct nccl_comm *comm, enum nccl_path path,
                       struct collective *const *colls, int count, struct nccl_execution **out)
{
    const struct hierarchy *hierarchy = path == PATH_HIERARCHICAL ? set->hierarchy : NULL;
    if (hierarchy) {
        set = hierarchy->local;
        comm = comm->local;
    }
    struct bhvd_device *device = comm->device;
    struct nccl_execution *x = *out = calloc(1, sizeof *x);
    if (!x)
        return executor_fail(exec, BHVD_ERR_SYSTEM, "no memory for a collective of %d ranks", set->size);
    *x = (struct nccl_execution){.exec = exec, .set = set, .hierarchy = hierarchy, .comm = comm,
                                 .device = device, .nccl = device->nccl, .colls = colls, .count = count,
                                 .stream = device->from_host, .scratch = {device, device->from_host, NULL}};
    int failed = device->ops->enter(device);
    if (failed) {
        free(x);
        *out = NULL;
        return executor_fail(exec, BHVD_ERR_SYSTEM, "GPU %d cannot be used by NCCL", device->index);
    }
    for (int i = 0; i < count && !failed; i++) {
        const struct collective *coll = colls[i];
        exec->nccl_payload += collective_nbytes(coll);
        if (coll->staging && coll->staging->device != device)
            return executor_fail(exec, BHVD_ERR_UNSUPPORTED, "rank %d posted '%.*s' on another GPU than before: keep to one, or "
                                 "set BAGUA_HVD_NCCL=0", exec->connections.rank, (int)coll->name_size, coll->name);
        if (coll->staging)
            failed = device->ops->stream_wait_event(device, x->stream, coll->staging->buffer->ready);
    }
    return nccl_execution_checked(x, failed);
}

bhvd_status nccl_end(struct nccl_execution *x, bhvd_status status)
{
    if (!x)
        return status;
    int failed = device_scratch_release(&x->scratch, 0);
    for (int i = 0; i < x->count && !status && !failed; i++) {
        struct collective *coll = x->colls[i];
        for (size_t t = 0; t < coll->tensor_count && coll->staging && !failed; t++) {
            if (coll->staging->tensors[t].result)
                failed = device_buffer_record(x->device, coll->staging->tensors[t].result, x->stream);
        }
        if (coll->staging && !failed) {
            coll->staging->by_nccl = true;
            failed = device_buffer_record(x->device, coll->staging->buffer, x->stream);
        }
    }
    failed = failed ? failed : x->device->ops->event_record(x->device, x->comm->done, x->stream);
    x->comm->last_ns = clock_now_ns();
    if (!status)
        status = nccl_execution_checked(x, failed);
    if (!status && x->host_waits)
        status = nccl_execution_wait(x, x->comm->done);
    x->device->ops->leave(x->device);
    free(x);
    return status;
}
