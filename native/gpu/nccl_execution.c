// Executions by NCCL: begin, end, and the collectives of nccl.h. Data is on the device; memory on the host (a joined rank's zeros
// in an allreduce, results that an algorithm wants on the host) is replaced by a scratch buffer on the device.
#include "gpu/nccl_execution.h"

#include <stdlib.h>

#include "base/clock.h"
#include "base/size.h"

// ---------------------------------------------------------------------------------------------------------- errors

bhvd_status nccl_execution_checked(struct nccl_execution *x, int failed)
{
    struct bhvd_error error;
    if (!failed)
        return BHVD_OK;
    device_failed(x->device, failed, "NCCL's streams cannot be used", &error);
    return executor_fail(x->exec, error.status, "rank %d: %s", x->exec->connections.rank, error.message);
}

bhvd_status nccl_execution_enqueued(struct nccl_execution *x, nccl_result result)
{
    if (result != NCCL_SUCCESS && result != NCCL_IN_PROGRESS)
        return nccl_failed(x->exec, x->comm, result, "a collective cannot be started");
    return result == NCCL_IN_PROGRESS ? nccl_settle(x->exec, x->comm) : BHVD_OK;
}

// Inside a group: keeps the first error, which is passed to the end.
static void keep_error(nccl_result *kept, nccl_result result)
{
    if (*kept == NCCL_SUCCESS && result != NCCL_SUCCESS && result != NCCL_IN_PROGRESS)
        *kept = result;
}

bhvd_status nccl_execution_group_end(struct nccl_execution *x, nccl_result inside)
{
    nccl_result result = x->nccl->group_end();
    return nccl_execution_enqueued(x, inside ? inside : result);
}

void nccl_execution_exchange(struct nccl_execution *x, nccl_result *inside, int peer, const void *out, size_t out_nbytes, void *in,
                             size_t in_nbytes)
{
    if (out_nbytes)
        keep_error(inside, x->nccl->send(out, out_nbytes, NCCL_UINT8, peer, x->comm->handle, x->stream));
    if (in_nbytes)
        keep_error(inside, x->nccl->recv(in, in_nbytes, NCCL_UINT8, peer, x->comm->handle, x->stream));
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
    return status ?: nccl_execution_checked(x, x->device->ops->event_query(x->device, event));
}

bhvd_status nccl_execution_copy(struct nccl_execution *x, void *dst, const void *src, size_t nbytes)
{
    return nbytes ? nccl_execution_checked(x, x->device->ops->copy(x->device, dst, src, nbytes, x->stream)) : BHVD_OK;
}

// --------------------------------------------------------------------------------------------------------- numbers

static enum nccl_type type_of(bhvd_dtype dtype)
{
    static const enum nccl_type types[BHVD_DTYPE_COUNT] = {
        [BHVD_UINT8] = NCCL_UINT8, [BHVD_INT8] = NCCL_INT8, [BHVD_INT32] = NCCL_INT32, [BHVD_INT64] = NCCL_INT64,
        [BHVD_FLOAT16] = NCCL_FLOAT16, [BHVD_FLOAT32] = NCCL_FLOAT32, [BHVD_FLOAT64] = NCCL_FLOAT64,
        [BHVD_BFLOAT16] = NCCL_BFLOAT16};
    return types[dtype];
}

static enum nccl_op op_of(bhvd_op op)
{
    return op == BHVD_OP_MIN       ? NCCL_MIN
           : op == BHVD_OP_MAX     ? NCCL_MAX
           : op == BHVD_OP_PRODUCT ? NCCL_PROD
                                   : NCCL_SUM;
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
        return nccl_execution_enqueued(x, x->nccl->reduce_scatter(src, dst, part_of(parts, 0) / element, type_of(dtype),
                                                                  op_of(op), x->comm->handle, x->stream));
    nccl_result inside = x->nccl->group_start();
    for (int i = 0; i < parts->count; src += part_of(parts, i++)) {
        if (part_of(parts, i))
            keep_error(&inside, x->nccl->reduce(src, i == x->set->rank ? dst : NULL, part_of(parts, i) / element,
                                                         type_of(dtype), op_of(op), i, x->comm->handle,
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
            keep_error(&inside, x->nccl->broadcast(i == x->set->rank ? src : dst, dst, part_of(parts, i), NCCL_UINT8, i,
                                                            x->comm->handle, x->stream));
    }
    return nccl_execution_group_end(x, inside);
}

// ---------------------------------------------------------------------------------------------------------- memory

static bhvd_status scratch_acquire(struct nccl_execution *x, size_t nbytes, void **out)
{
    return nccl_execution_checked(x, device_scratch_acquire(&x->scratch, nbytes, out));
}

// A result in flight: written at `device`, and copied from there to `host` if that is set.
struct target {
    void *device, *host;
    size_t nbytes;
};

// Finds the memory of a result. If the caller gave none, allocates it: on the device if its size is known only now.
static bhvd_status target(struct nccl_execution *x, struct collective *coll, size_t index, int64_t dim0, struct target *out)
{
    struct tensor *tensor = &coll->tensors[index];
    struct staged_tensor *staged = &coll->staging->tensors[index];
    tensor->result_dim0 = dim0;
    tensor->result_nbytes = (size_t)dim0 * tensor->row_nbytes;
    *out = (struct target){NULL, NULL, tensor->result_nbytes};
    if (staged->dst && !staged->dst_on_host) {
        out->device = staged->dst;
        return BHVD_OK;
    }
    if (!staged->dst && (coll->args.kind == BHVD_ALLGATHER || coll->args.kind == BHVD_ALLTOALL)) {
        int failed = device_buffer_acquire(x->device, MEMORY_DEVICE, out->nbytes, &staged->result);
        if (failed)
            return nccl_execution_checked(x, failed);
        out->device = staged->result->data;
        return BHVD_OK;
    }
    if (executor_allocate_result(x->exec, tensor, dim0))
        return x->exec->failure.status;
    out->host = staged->dst ? staged->dst : tensor->result;
    return scratch_acquire(x, out->nbytes, &out->device);
}

static bhvd_status finish_target(struct nccl_execution *x, const struct target *target)
{
    if (!target->host || !target->nbytes)
        return BHVD_OK;
    x->host_waits = true;
    return nccl_execution_copy(x, target->host, target->device, target->nbytes);
}

// --------------------------------------------------------------------------------------------------------- scaling

static bhvd_status scale(struct nccl_execution *x, bhvd_dtype dtype, void *dst, const void *src, double factor, size_t nbytes)
{
    uint64_t count = nbytes / bhvd_dtype_size(dtype);
    void *params[] = {&dst, &src, &factor, &count};
    return count ? nccl_execution_checked(x, device_launch_over(x->device, BHVD_DEVICE_SCALE, device_type_of(dtype), count,
                                                                params, x->stream))
                 : BHVD_OK;
}

// ------------------------------------------------------------------------------------------------------- allreduce

// dst = postscale * reduce over ranks (prescale * src). Hierarchical: in place, with more memory (nccl_hierarchical_nbytes).
static bhvd_status reduce_vector(struct nccl_execution *x, bhvd_op op, const struct reduction *reduction, void *dst,
                                 const void *src, size_t nbytes)
{
    bhvd_status status = BHVD_OK;
    if (reduction->prescale != 1.0) {
        status = scale(x, reduction->dtype, dst, src, reduction->prescale, nbytes);
        src = dst;
    }
    if (!status && x->hierarchy)
        return nccl_hierarchical_allreduce(x, op, reduction, dst, nbytes);
    status = status ?: nccl_execution_enqueued(x, x->nccl->all_reduce(src, dst, nbytes / bhvd_dtype_size(reduction->dtype),
                                                                      type_of(reduction->dtype), op_of(op),
                                                                      x->comm->handle, x->stream));
    if (!status && reduction->postscale != 1.0)
        status = scale(x, reduction->dtype, dst, dst, reduction->postscale, nbytes);
    return status;
}

// For a proxy: its memory is freed when the operation ends, so the host waits for the copy.
static bhvd_status copy_zeros(struct nccl_execution *x, void *dst, const struct tensor *tensor)
{
    x->host_waits = true;
    return nccl_execution_copy(x, dst, tensor->src, tensor->nbytes);
}

// Copies between a tensor and its offset in the fusion buffer. The driver copies from and to the host's memory, at once.
static bhvd_status copy_one(struct nccl_execution *x, struct device_copies *copies, const struct collective *coll, size_t t,
                            unsigned char *fused, bool packs)
{
    const struct tensor *tensor = &coll->tensors[t];
    if (coll->is_proxy)
        return packs ? copy_zeros(x, fused, tensor) : BHVD_OK;
    const struct staged_tensor *staged = &coll->staging->tensors[t];
    if (packs)
        return nccl_execution_checked(x, device_copies_add(copies, fused, staged->src, tensor->nbytes));
    if (staged->dst && !staged->dst_on_host)
        return nccl_execution_checked(x, device_copies_add(copies, staged->dst, fused, tensor->nbytes));
    return finish_target(x, &(struct target){fused, staged->dst ? staged->dst : tensor->result, tensor->nbytes});
}

static bhvd_status copy_fused(struct nccl_execution *x, bhvd_dtype dtype, unsigned char *fused, bool packs)
{
    struct device_copies copies;
    size_t tensors = 0;
    for (int i = 0; i < x->count; i++)
        tensors += x->colls[i]->args.tensor_count;
    bhvd_status status = nccl_execution_checked(x, device_copies_begin(&copies, &x->scratch, tensors));
    for (int i = 0; i < x->count && !status; i++) {
        const struct collective *coll = x->colls[i];
        for (size_t t = 0; t < coll->args.tensor_count && !status; t++) {
            if (coll->tensors[t].dtype != dtype)
                continue;
            status = copy_one(x, &copies, coll, t, fused, packs);
            fused += size_round_up(coll->tensors[t].nbytes, NCCL_ALIGNMENT);
        }
    }
    return status ?: nccl_execution_checked(x, device_copies_end(&copies, 0));
}

bhvd_status nccl_allreduce(struct nccl_execution *x, bhvd_op op, const struct reduction *reduction)
{
    const struct collective *only = x->colls[0];
    const struct staged_tensor *staged = only->is_proxy ? NULL : &only->staging->tensors[0];
    if (!x->hierarchy && x->count == 1 && only->args.tensor_count == 1 && staged && staged->dst && !staged->dst_on_host)
        return only->tensors[0].nbytes
                   ? reduce_vector(x, op, reduction, staged->dst, staged->src, only->tensors[0].nbytes) : BHVD_OK;
    size_t nbytes = 0, only_nbytes = 0, tensors = 0;
    for (int i = 0; i < x->count; i++) {
        const struct collective *fused = x->colls[i];
        for (size_t t = 0; t < fused->args.tensor_count; t++) {
            if (fused->tensors[t].dtype != reduction->dtype || !fused->tensors[t].nbytes)
                continue;
            only_nbytes = fused->tensors[t].nbytes;
            nbytes += size_round_up(only_nbytes, NCCL_ALIGNMENT);
            tensors++;
        }
    }
    if (tensors == 1)
        nbytes = only_nbytes;           // as on the ranks that take the path above, without a copy
    if (nbytes == 0)
        return BHVD_OK;
    void *vector = NULL;
    bhvd_status status = scratch_acquire(x, x->hierarchy ? nccl_hierarchical_nbytes(x->hierarchy, nbytes) : nbytes, &vector);
    status = status ?: copy_fused(x, reduction->dtype, vector, true);
    status = status ?: reduce_vector(x, op, reduction, vector, vector, nbytes);
    return status ?: copy_fused(x, reduction->dtype, vector, false);
}

// ----------------------------------------------------------------------------------------- one tensor after the other

bhvd_status nccl_reducescatter(struct nccl_execution *x, struct collective *coll, size_t index, int64_t rows,
                               const struct reduction *reduction, const size_t *part)
{
    const size_t nbytes = coll->tensors[index].nbytes;
    const void *src = coll->staging->tensors[index].src;
    struct target result;
    bhvd_status status = target(x, coll, index, rows, &result);
    if (!nbytes)
        return status;
    if (!status && reduction->prescale != 1.0) {
        void *scaled = NULL;
        status = scratch_acquire(x, nbytes, &scaled);
        status = status ?: scale(x, reduction->dtype, scaled, src, reduction->prescale, nbytes);
        src = scaled;
    }
    status = status ?: nccl_execution_reduce_scatter(x, coll->args.op, reduction->dtype, src, result.device,
                                                     &(struct nccl_parts){.of = part, .count = x->set->size});
    if (!status && reduction->postscale != 1.0)
        status = scale(x, reduction->dtype, result.device, result.device, reduction->postscale, part[x->set->rank]);
    return status ?: finish_target(x, &result);
}

bhvd_status nccl_allgather(struct nccl_execution *x, struct collective *coll, size_t index, int64_t rows, const size_t *part)
{
    struct target result;
    bhvd_status status = target(x, coll, index, rows, &result);
    if (status || !result.nbytes)
        return status;
    status = nccl_execution_all_gather(x, coll->staging->tensors[index].src, result.device,
                                       &(struct nccl_parts){.of = part, .count = x->set->size});
    return status ?: finish_target(x, &result);
}

bhvd_status nccl_alltoall(struct nccl_execution *x, struct collective *coll, size_t index, int64_t rows,
                          const struct parts *parts)
{
    struct target result;
    bhvd_status status = target(x, coll, index, rows, &result);
    if (status)
        return status;
    const unsigned char *from = coll->staging->tensors[index].src;
    unsigned char *to = result.device;
    nccl_result inside = x->nccl->group_start();
    for (int i = 0; i < x->set->size; from += parts->sent[i], to += parts->received[i], i++)
        nccl_execution_exchange(x, &inside, i, from, parts->sent[i], to, parts->received[i]);
    status = nccl_execution_group_end(x, inside);
    return status ?: finish_target(x, &result);
}

bhvd_status nccl_broadcast(struct nccl_execution *x, struct collective *coll, size_t index, int root)
{
    const void *src = coll->staging->tensors[index].src;
    struct target result;
    bhvd_status status = target(x, coll, index, coll->tensors[index].dim0, &result);
    if (!status && result.nbytes && x->hierarchy)
        status = nccl_hierarchical_broadcast(x, root, src, result.device, result.nbytes);
    else if (!status && result.nbytes)
        status = nccl_execution_enqueued(x, x->nccl->broadcast(src, result.device, result.nbytes, NCCL_UINT8, root, x->comm->handle,
                                                               x->stream));
    return status ?: finish_target(x, &result);
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
                                 "set BAGUA_HVD_NCCL=0", exec->connections.rank, (int)coll->name_size, coll->args.name);
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
        for (size_t t = 0; t < coll->args.tensor_count && coll->staging && !failed; t++) {
            if (coll->staging->tensors[t].result)
                failed = device_buffer_record(x->device, coll->staging->tensors[t].result, x->stream);
        }
        if (coll->staging && !failed) {
            coll->staging->by_nccl = true;
            failed = device_buffer_record(x->device, coll->staging->buffer, x->stream);
        }
    }
    failed = failed ?: x->device->ops->event_record(x->device, x->comm->done, x->stream);
    x->comm->last_ns = clock_now_ns();
    status = status ?: nccl_execution_checked(x, failed);
    if (!status && x->host_waits)
        status = nccl_execution_wait(x, x->comm->done);
    x->device->ops->leave(x->device);
    free(x);
    return status;
}
