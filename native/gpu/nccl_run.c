// An execution by NCCL: begin, end, and helpers for its collectives (nccl_run.h).
#include "gpu/nccl_run.h"

#include <stdlib.h>

#include "base/clock.h"

// ---------------------------------------------------------------------------------------------------------- errors

bhvd_status nccl_run_checked(struct nccl_run *x, int code)
{
    struct bhvd_error error;
    if (!code)
        return BHVD_OK;
    device_failed(x->device, code, "NCCL's streams cannot be used", &error);
    return run_fail(x->run, error.status, "rank %d: %s", x->run->connections.rank, error.message);
}

// For a call outside a group, or the end of a group.
bhvd_status nccl_run_enqueued(struct nccl_run *x, nccl_result result)
{
    if (result != NCCL_SUCCESS && result != NCCL_IN_PROGRESS)
        return nccl_failed(x->run, x->group, result, "a collective cannot be started");
    return result == NCCL_IN_PROGRESS ? nccl_settle(x->run, x->group) : BHVD_OK;
}

// Keeps the first error of a group.
void nccl_run_keep(nccl_result *kept, nccl_result result)
{
    if (*kept == NCCL_SUCCESS && result != NCCL_SUCCESS && result != NCCL_IN_PROGRESS)
        *kept = result;
}

bhvd_status nccl_run_group_end(struct nccl_run *x, nccl_result inside)
{
    nccl_result result = x->nccl->group_end();
    return nccl_run_enqueued(x, inside ? inside : result);
}

static int has_passed(struct run *run, void *arg)
{
    void **device_and_event = arg;
    struct bhvd_device *device = device_and_event[0];
    (void)run;
    return device->ops->event_query(device, device_and_event[1]) != DEVICE_NOT_READY;
}

bhvd_status nccl_run_wait(struct nccl_run *x, void *event)
{
    void *device_and_event[] = {x->device, event};
    bhvd_status status = run_until_gpu(x->run, has_passed, device_and_event);
    return status ? status : nccl_run_checked(x, x->device->ops->event_query(x->device, event));
}

bhvd_status nccl_run_copy(struct nccl_run *x, void *dst, const void *src, size_t nbytes)
{
    return nbytes ? nccl_run_checked(x, x->device->ops->copy(x->device, dst, src, nbytes, x->stream)) : BHVD_OK;
}

// --------------------------------------------------------------------------------------------------------- numbers

enum nccl_type nccl_run_type(bhvd_dtype dtype)
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

enum nccl_op nccl_run_op(bhvd_op op)
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
static bool are_equal(const struct nccl_run *x, const struct nccl_parts *parts)
{
    for (int i = 1; i < parts->count; i++)
        if (part_of(parts, i) != part_of(parts, 0))
            return false;
    return parts->count == x->set->size;
}

bhvd_status nccl_run_reduce_scatter(struct nccl_run *x, bhvd_op op, bhvd_dtype dtype, const unsigned char *src, void *dst,
                                    const struct nccl_parts *parts)
{
    const size_t element = bhvd_dtype_size(dtype);
    if (are_equal(x, parts))
        return nccl_run_enqueued(x, x->nccl->reduce_scatter(src, dst, part_of(parts, 0) / element, nccl_run_type(dtype),
                                                            nccl_run_op(op), x->group->comm, x->stream));
    nccl_result inside = x->nccl->group_start();
    for (int i = 0; i < parts->count; src += part_of(parts, i++)) {
        if (part_of(parts, i))
            nccl_run_keep(&inside, x->nccl->reduce(src, i == x->set->rank ? dst : NULL, part_of(parts, i) / element,
                                                   nccl_run_type(dtype), nccl_run_op(op), i, x->group->comm, x->stream));
    }
    return nccl_run_group_end(x, inside);
}

bhvd_status nccl_run_all_gather(struct nccl_run *x, const void *src, unsigned char *dst, const struct nccl_parts *parts)
{
    if (are_equal(x, parts))
        return nccl_run_enqueued(x, x->nccl->all_gather(src, dst, part_of(parts, 0), NCCL_UINT8, x->group->comm, x->stream));
    nccl_result inside = x->nccl->group_start();
    for (int i = 0; i < parts->count; dst += part_of(parts, i++)) {
        if (part_of(parts, i))
            nccl_run_keep(&inside, x->nccl->broadcast(i == x->set->rank ? src : dst, dst, part_of(parts, i), NCCL_UINT8, i,
                                                      x->group->comm, x->stream));
    }
    return nccl_run_group_end(x, inside);
}

// ------------------------------------------------------------------------------------------------- begin and end

bhvd_status nccl_begin(struct run *run, struct group *set, struct nccl_group *group, enum nccl_path path,
                       struct work *const *works, int count, struct nccl_run **out)
{
    const struct hierarchy *hierarchy = path == PATH_TWO_LEVEL ? set->hierarchy : NULL;
    if (hierarchy) {
        set = hierarchy->local;
        group = group->local;
    }
    struct bhvd_device *device = group->device;
    struct nccl_run *x = *out = calloc(1, sizeof *x);
    if (!x)
        return run_fail(run, BHVD_ERR_SYSTEM, "no memory for a collective of %d ranks", set->size);
    *x = (struct nccl_run){.run = run, .set = set, .hierarchy = hierarchy, .group = group,
                           .device = device, .nccl = device->nccl, .works = works, .count = count, .stream = device->from_host,
                           .scratch = {device, device->from_host, NULL}};
    int code = device->ops->enter(device);
    if (code) {
        free(x);
        *out = NULL;
        return run_fail(run, BHVD_ERR_SYSTEM, "GPU %d cannot be used by NCCL", device->index);
    }
    for (int i = 0; i < count && !code; i++) {
        const struct work *work = works[i];
        run->nccl_payload += work_nbytes(work);
        if (work->staging && work->staging->device != device)
            return run_fail(run, BHVD_ERR_UNSUPPORTED, "rank %d posted '%.*s' on another GPU than before: keep to one, or "
                            "set BAGUA_HVD_NCCL=0", run->connections.rank, (int)work->name_size, work->name);
        if (work->staging)
            code = device->ops->stream_wait_event(device, x->stream, work->staging->buffer->ready);
    }
    return nccl_run_checked(x, code);
}

bhvd_status nccl_end(struct nccl_run *x, bhvd_status status)
{
    if (!x)
        return status;
    int code = device_scratch_release(&x->scratch, 0);
    for (int i = 0; i < x->count && !status && !code; i++) {
        struct work *work = x->works[i];
        for (size_t t = 0; t < work->tensor_count && work->staging && !code; t++) {
            if (work->staging->places[t].result)
                code = device_buffer_record(x->device, work->staging->places[t].result, x->stream);
        }
        if (work->staging && !code) {
            work->staging->by_nccl = true;
            code = device_buffer_record(x->device, work->staging->buffer, x->stream);
        }
    }
    code = code ? code : x->device->ops->event_record(x->device, x->group->done, x->stream);
    x->group->last_ns = clock_now_ns();
    if (!status)
        status = nccl_run_checked(x, code);
    if (!status && x->host_waits)
        status = nccl_run_wait(x, x->group->done);
    x->device->ops->leave(x->device);
    free(x);
    return status;
}
