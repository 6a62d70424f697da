// The collectives of nccl.h. Data lies on the device; where a rank's memory is the host's (a joined rank's zeros in an
// allreduce, results that an algorithm wants on the host), a scratch buffer on the device stands in for it.
#include <stdlib.h>

#include "collective/nccl.h"
#include "device/buffer.h"
#include "device/nccl.h"
#include "device/staging.h"

enum {
    ALIGNMENT = 256,                    // of tensors in the fusion buffer, for vectors in NCCL's kernels
    SCALE_THREADS = 256,
    SCALE_BLOCKS_MAX = 4096,            // several times what any GPU runs at once
    SCALE_PER_BLOCK = 4 * SCALE_THREADS
};

struct nccl_run {
    bhvd_context *ctx;
    struct process_set *set;
    struct nccl_group *group;
    struct bhvd_device *device;
    const struct nccl *nccl;
    const struct execution *execution;
    void *stream;
    struct device_buffer *tables;       // pinned: tables of spans, one after the other; its `done` ends the execution
    size_t spans_used;
    struct device_buffer *scratch;      // in use, linked by `next`
    bool host_waits;
};

// ---------------------------------------------------------------------------------------------------------- errors

static bhvd_status driver_failed(struct nccl_run *x, int code)
{
    struct bhvd_error error;
    device_failed(x->device, code, "NCCL's streams cannot be used", &error);
    return context_fail(x->ctx, error.status, "rank %d: %s", x->ctx->options.rank, error.message);
}

static bhvd_status checked(struct nccl_run *x, int code) { return code ? driver_failed(x, code) : BHVD_OK; }

// Of a call outside a group, or of the group's end.
static bhvd_status enqueued(struct nccl_run *x, nccl_result result)
{
    if (result != NCCL_SUCCESS && result != NCCL_IN_PROGRESS)
        return nccl_failed(x->ctx, x->group, result, "a collective cannot be started");
    return result == NCCL_IN_PROGRESS ? nccl_settle(x->ctx, x->group) : BHVD_OK;
}

// The first result of a group that is none of the good ones stays.
static void keep_error(nccl_result *kept, nccl_result result)
{
    if (*kept == NCCL_SUCCESS && result != NCCL_SUCCESS && result != NCCL_IN_PROGRESS)
        *kept = result;
}

static bhvd_status group_end(struct nccl_run *x, nccl_result inside)
{
    nccl_result result = x->nccl->group_end();
    return enqueued(x, inside ? inside : result);
}

// ---------------------------------------------------------------------------------------------------------- memory

static bhvd_status scratch_acquire(struct nccl_run *x, size_t nbytes, void **out)
{
    struct device_buffer *buffer;
    int code = device_buffer_acquire(x->device, MEMORY_DEVICE, nbytes, &buffer);
    if (code)
        return driver_failed(x, code);
    buffer->next = x->scratch;
    x->scratch = buffer;
    *out = buffer->data;
    return BHVD_OK;
}

static bhvd_status copy(struct nccl_run *x, void *dst, const void *src, size_t nbytes)
{
    return nbytes ? checked(x, x->device->ops->copy(x->device, dst, src, nbytes, x->stream)) : BHVD_OK;
}

// A result on its way: written at `device`, and from there to the host where it belongs there.
struct target {
    void *device, *host;
    size_t nbytes;
};

// Results that the core allocates: on the device those of which only now the size is known, as the front end expects.
static bhvd_status target(struct nccl_run *x, struct bhvd_handle *op, size_t index, int64_t dim0, struct target *out)
{
    struct tensor *tensor = &op->tensors[index];
    struct staging_place *place = &op->staging->places[index];
    tensor->result_dim0 = dim0;
    tensor->result_nbytes = (size_t)dim0 * tensor->row_nbytes;
    *out = (struct target){NULL, NULL, tensor->result_nbytes};
    if (place->dst && !place->dst_on_host) {
        out->device = place->dst;
        return BHVD_OK;
    }
    if (!place->dst && (op->kind == BHVD_ALLGATHER || op->kind == BHVD_ALLTOALL)) {
        int code = device_buffer_acquire(x->device, MEMORY_DEVICE, out->nbytes, &place->result);
        if (code)
            return driver_failed(x, code);
        out->device = place->result->data;
        return BHVD_OK;
    }
    if (operation_allocate_result(tensor, dim0))
        return context_fail(x->ctx, BHVD_ERR_SYSTEM, "no memory for a result of %zu bytes", out->nbytes);
    out->host = place->dst ? place->dst : tensor->result;
    return scratch_acquire(x, out->nbytes, &out->device);
}

static bhvd_status finish_target(struct nccl_run *x, const struct target *target)
{
    if (!target->host || !target->nbytes)
        return BHVD_OK;
    x->host_waits = true;
    return copy(x, target->host, target->device, target->nbytes);
}

// --------------------------------------------------------------------------------------------------------- numbers

static enum nccl_type type_of(bhvd_dtype dtype)
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

static enum nccl_op op_of(bhvd_op op)
{
    switch (op) {
    case BHVD_OP_MIN: return NCCL_MIN;
    case BHVD_OP_MAX: return NCCL_MAX;
    case BHVD_OP_PRODUCT: return NCCL_PROD;
    default: return NCCL_SUM;
    }
}

static int scale_kernel_of(bhvd_dtype dtype)
{
    return dtype == BHVD_FLOAT64    ? BHVD_DEVICE_SCALE_F64
           : dtype == BHVD_FLOAT16  ? BHVD_DEVICE_SCALE_F16
           : dtype == BHVD_BFLOAT16 ? BHVD_DEVICE_SCALE_BF16
                                    : BHVD_DEVICE_SCALE_F32;
}

static bhvd_status scale(struct nccl_run *x, bhvd_dtype dtype, void *dst, const void *src, double factor, size_t nbytes)
{
    uint64_t count = nbytes / bhvd_dtype_size(dtype);
    uint64_t blocks = (count + SCALE_PER_BLOCK - 1) / SCALE_PER_BLOCK;
    void *params[] = {&dst, &src, &factor, &count};
    if (count == 0)
        return BHVD_OK;
    return checked(x, x->device->ops->launch(x->device, atomic_load(&x->device->kernels[scale_kernel_of(dtype)]),
                                             (unsigned)(blocks < SCALE_BLOCKS_MAX ? blocks : SCALE_BLOCKS_MAX),
                                             SCALE_THREADS, params, x->stream));
}

// ------------------------------------------------------------------------------------------------------- allreduce

// dst = postscale * reduce over ranks (prescale * src)
static bhvd_status reduce_vector(struct nccl_run *x, bhvd_op op, const struct reduction *reduction, void *dst,
                                 const void *src, size_t nbytes)
{
    bhvd_status status = BHVD_OK;
    if (reduction->prescale != 1.0) {
        status = scale(x, reduction->dtype, dst, src, reduction->prescale, nbytes);
        src = dst;
    }
    if (!status)
        status = enqueued(x, x->nccl->all_reduce(src, dst, nbytes / bhvd_dtype_size(reduction->dtype),
                                                 type_of(reduction->dtype), op_of(op), x->group->comm, x->stream));
    if (!status && reduction->postscale != 1.0)
        status = scale(x, reduction->dtype, dst, dst, reduction->postscale, nbytes);
    return status;
}

static size_t aligned(size_t nbytes) { return (nbytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT; }

// Of a phantom, whose memory goes with it when the operation ends: so that is waited for.
static bhvd_status copy_zeros(struct nccl_run *x, void *dst, const struct tensor *tensor)
{
    x->host_waits = true;
    return copy(x, dst, tensor->src, tensor->nbytes);
}

// Between the tensors and their places in the fusion buffer. Memory of the host is out of reach for the kernel that copies
// many spans at once: it goes by copies of its own.
static bhvd_status copy_fused(struct nccl_run *x, bhvd_dtype dtype, unsigned char *fused, bool packs)
{
    struct device_span *table = (struct device_span *)(void *)x->tables->data + x->spans_used;
    size_t spans = 0;
    bhvd_status status = BHVD_OK;
    for (int i = 0; i < x->execution->count && !status; i++) {
        const struct bhvd_handle *op = x->execution->operations[i];
        for (size_t t = 0; t < op->tensor_count && !status; t++) {
            const struct tensor *tensor = &op->tensors[t];
            const struct staging_place *place = op->phantom ? NULL : &op->staging->places[t];
            if (tensor->dtype != dtype || !tensor->nbytes)
                continue;
            if (packs && place)
                table[spans++] = (struct device_span){place->src, fused, tensor->nbytes, 0};
            else if (packs)
                status = copy_zeros(x, fused, tensor);
            else if (place && place->dst && !place->dst_on_host)
                table[spans++] = (struct device_span){fused, place->dst, tensor->nbytes, 0};
            else if (place)
                status = finish_target(x, &(struct target){fused, place->dst ? place->dst : tensor->result, tensor->nbytes});
            fused += aligned(tensor->nbytes);
        }
    }
    x->spans_used += spans;
    return status ? status : checked(x, device_copy_spans(x->device, table, spans, x->stream));
}

bhvd_status nccl_allreduce(struct nccl_run *x, const struct execution *execution, bhvd_op op,
                           const struct reduction *reduction)
{
    const struct bhvd_handle *only = execution->operations[0];
    const struct staging_place *place = only->phantom ? NULL : &only->staging->places[0];
    if (execution->count == 1 && only->tensor_count == 1 && place && place->dst && !place->dst_on_host)
        return only->tensors[0].nbytes
                   ? reduce_vector(x, op, reduction, place->dst, place->src, only->tensors[0].nbytes) : BHVD_OK;
    size_t nbytes = 0, only_nbytes = 0, tensors = 0;
    for (int i = 0; i < execution->count; i++) {
        const struct bhvd_handle *fused = execution->operations[i];
        for (size_t t = 0; t < fused->tensor_count; t++) {
            if (fused->tensors[t].dtype != reduction->dtype || !fused->tensors[t].nbytes)
                continue;
            only_nbytes = fused->tensors[t].nbytes;
            nbytes += aligned(only_nbytes);
            tensors++;
        }
    }
    if (tensors == 1)
        nbytes = only_nbytes;           // as on the ranks that take the way above, which needs no copy
    if (nbytes == 0)
        return BHVD_OK;
    void *vector = NULL;
    bhvd_status status = scratch_acquire(x, nbytes, &vector);
    if (!status)
        status = copy_fused(x, reduction->dtype, vector, true);
    if (!status)
        status = reduce_vector(x, op, reduction, vector, vector, nbytes);
    return status ? status : copy_fused(x, reduction->dtype, vector, false);
}

// ----------------------------------------------------------------------------------------- one tensor after the other

bhvd_status nccl_reducescatter(struct nccl_run *x, struct bhvd_handle *op, size_t index, int64_t rows,
                               const struct reduction *reduction, const size_t *part)
{
    const struct tensor *tensor = &op->tensors[index];
    const enum nccl_type type = type_of(reduction->dtype);
    const size_t element = bhvd_dtype_size(reduction->dtype), mine = part[x->set->rank];
    const void *src = op->staging->places[index].src;
    struct target result;
    bhvd_status status = target(x, op, index, rows, &result);
    if (!tensor->nbytes)
        return status;
    if (!status && reduction->prescale != 1.0) {
        void *scaled = NULL;
        status = scratch_acquire(x, tensor->nbytes, &scaled);
        if (!status)
            status = scale(x, reduction->dtype, scaled, src, reduction->prescale, tensor->nbytes);
        src = scaled;
    }
    if (status)
        return status;
    if (part[0] == part[x->set->size - 1]) {
        status = enqueued(x, x->nccl->reduce_scatter(src, result.device, mine / element, type, op_of(op->op), x->group->comm,
                                                     x->stream));
    } else {
        nccl_result inside = x->nccl->group_start();
        const unsigned char *at = src;
        for (int i = 0; i < x->set->size; at += part[i++]) {
            if (part[i])
                keep_error(&inside, x->nccl->reduce(at, i == x->set->rank ? result.device : NULL, part[i] / element, type,
                                                    op_of(op->op), i, x->group->comm, x->stream));
        }
        status = group_end(x, inside);
    }
    if (!status && reduction->postscale != 1.0)
        status = scale(x, reduction->dtype, result.device, result.device, reduction->postscale, mine);
    return status ? status : finish_target(x, &result);
}

bhvd_status nccl_allgather(struct nccl_run *x, struct bhvd_handle *op, size_t index, int64_t rows, const size_t *part)
{
    bool is_even = true;
    const void *src = op->staging->places[index].src;
    struct target result;
    for (int i = 0; i < x->set->size; i++)
        is_even &= part[i] == part[0];
    bhvd_status status = target(x, op, index, rows, &result);
    if (status || !result.nbytes)
        return status;
    if (is_even) {
        status = enqueued(x, x->nccl->all_gather(src, result.device, part[0], NCCL_UINT8, x->group->comm, x->stream));
    } else {
        nccl_result inside = x->nccl->group_start();
        unsigned char *at = result.device;
        for (int i = 0; i < x->set->size; at += part[i++]) {
            if (part[i])
                keep_error(&inside, x->nccl->broadcast(i == x->set->rank ? src : at, at, part[i], NCCL_UINT8, i,
                                                       x->group->comm, x->stream));
        }
        status = group_end(x, inside);
    }
    return status ? status : finish_target(x, &result);
}

bhvd_status nccl_alltoall(struct nccl_run *x, struct bhvd_handle *op, size_t index, int64_t rows, const size_t *bytes)
{
    const int n = x->set->size, me = x->set->rank;
    const void *src = op->staging->places[index].src;
    struct target result;
    bhvd_status status = target(x, op, index, rows, &result);
    if (status)
        return status;
    nccl_result inside = x->nccl->group_start();
    const unsigned char *from = src;
    unsigned char *to = result.device;
    for (int i = 0; i < n; i++) {
        const size_t sent = bytes[me * n + i], received = bytes[i * n + me];
        if (sent)
            keep_error(&inside, x->nccl->send(from, sent, NCCL_UINT8, i, x->group->comm, x->stream));
        if (received)
            keep_error(&inside, x->nccl->recv(to, received, NCCL_UINT8, i, x->group->comm, x->stream));
        from += sent;
        to += received;
    }
    status = group_end(x, inside);
    return status ? status : finish_target(x, &result);
}

bhvd_status nccl_broadcast(struct nccl_run *x, struct bhvd_handle *op, size_t index, int root)
{
    const void *src = op->staging->places[index].src;
    struct target result;
    bhvd_status status = target(x, op, index, op->tensors[index].dim0, &result);
    if (!status && result.nbytes)
        status = enqueued(x, x->nccl->broadcast(src, result.device, result.nbytes, NCCL_UINT8, root, x->group->comm, x->stream));
    return status ? status : finish_target(x, &result);
}

// ------------------------------------------------------------------------------------------------- begin and end

bhvd_status nccl_begin(bhvd_context *ctx, struct process_set *set, const struct execution *execution,
                       struct nccl_run **out)
{
    struct bhvd_device *device = set->nccl->device;
    struct nccl_run *x = *out = calloc(1, sizeof *x);
    size_t spans = 0;
    if (!x)
        return context_fail(ctx, BHVD_ERR_SYSTEM, "no memory for a collective of %d ranks", set->size);
    *x = (struct nccl_run){.ctx = ctx, .set = set, .group = set->nccl, .device = device, .nccl = device->nccl,
                           .execution = execution, .stream = device->from_host};
    for (int i = 0; i < execution->count; i++)
        spans += execution->operations[i]->tensor_count;
    int code = device->ops->enter(device);
    if (code) {
        free(x);
        *out = NULL;
        return context_fail(ctx, BHVD_ERR_SYSTEM, "GPU %d cannot be used by NCCL", device->index);
    }
    code = device_buffer_acquire(device, MEMORY_PINNED, 2 * spans * sizeof(struct device_span), &x->tables);
    for (int i = 0; i < execution->count && !code; i++) {
        const struct bhvd_handle *op = execution->operations[i];
        if (op->staging && op->staging->device != device)
            return context_fail(ctx, BHVD_ERR_UNSUPPORTED, "rank %d posted '%.*s' on another GPU than before: keep to one, or "
                                "set BAGUA_HVD_NCCL=0", ctx->options.rank, (int)op->name_size, op->name);
        if (op->staging)
            code = device->ops->stream_wait_event(device, x->stream, op->staging->buffer->ready);
    }
    return checked(x, code);
}

static int is_done(bhvd_context *ctx, void *arg)
{
    const struct nccl_run *x = arg;
    (void)ctx;
    return x->device->ops->event_query(x->device, x->tables->done) != DEVICE_NOT_READY;
}

// The `done` event of whatever was used, so that nobody else gets it before.
static int record(struct nccl_run *x, struct device_buffer *buffer)
{
    buffer->last = buffer->done;
    return x->device->ops->event_record(x->device, buffer->done, x->stream);
}

bhvd_status nccl_end(struct nccl_run *x, bhvd_status status)
{
    int code = 0;
    if (!x)
        return status;
    for (struct device_buffer *buffer = x->scratch, *next; buffer; buffer = next) {
        next = buffer->next;
        code = code ? code : record(x, buffer);
        device_buffer_release(x->device, buffer);
    }
    for (int i = 0; i < x->execution->count && !status && !code; i++) {
        struct bhvd_handle *op = x->execution->operations[i];
        for (size_t t = 0; t < op->tensor_count && op->staging && !code; t++) {
            if (op->staging->places[t].result)
                code = record(x, op->staging->places[t].result);
        }
        if (op->staging && !code) {
            op->staging->by_nccl = true;
            code = record(x, op->staging->buffer);
        }
    }
    if (x->tables) {
        code = code ? code : record(x, x->tables);
        device_buffer_release(x->device, x->group->last);
        x->group->last = x->tables;
    }
    if (!status)
        status = checked(x, code);
    if (!status && x->host_waits)
        status = nccl_wait(x->ctx, is_done, x);
    if (!status && x->host_waits)
        status = checked(x, x->device->ops->event_query(x->device, x->tables->done));
    x->device->ops->leave(x->device);
    free(x);
    return status;
}
