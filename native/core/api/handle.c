// Public functions on posted operations.
#include <time.h>

#include "base/clock.h"
#include "base/status.h"
#include "core/api/api.h"
#include "core/context/context.h"
#include "core/context/operation.h"
#include "core/engine/process_sets.h"
#include "device/buffer.h"
#include "device/device.h"
#include "gpu/staging.h"

bhvd_status bhvd_wait(bhvd_handle *op, int timeout_ms, struct bhvd_error *error)
{
    if (!operation_is_complete(op) && op->ctx->abandoned)
        return error_set(error, BHVD_ERR_SHUTDOWN, "operation '%.*s' belongs to the parent of this forked process",
                         (int)op->coll.name_size, op->coll.args.name);
    if (!operation_is_complete(op))
        progress_wait(op, clock_deadline_ns(timeout_ms));
    if (!operation_is_complete(op))
        return error_set(error, BHVD_IN_PROGRESS, "operation '%.*s' is in progress", (int)op->coll.name_size, op->coll.args.name);
    if (error)
        *error = op->error;
    return op->error.status;
}

int bhvd_poll(bhvd_handle *op) { return operation_is_complete(op); }

int64_t bhvd_handle_value(bhvd_handle *op) { return op->value; }

void bhvd_handle_drop(bhvd_handle *op) { operation_release(op); }

bhvd_status bhvd_result(bhvd_handle *op, size_t index, struct bhvd_result *out)
{
    if (!operation_is_complete(op) || op->error.status || index >= op->coll.args.tensor_count)
        return BHVD_ERR_ARGUMENT;
    const struct tensor *tensor = &op->coll.tensors[index];
    *out = (struct bhvd_result){tensor->result, tensor->result_nbytes, tensor->result_dim0, 0};
    if (op->coll.staging && op->coll.staging->tensors[index].result) {
        out->data = op->coll.staging->tensors[index].result->data;
        out->on_device = 1;
    }
    return BHVD_OK;
}

bhvd_status bhvd_result_take(bhvd_handle *op, size_t index, struct bhvd_result *out)
{
    bhvd_status status = bhvd_result(op, index, out);
    if (!status && out->on_device)
        return BHVD_ERR_ARGUMENT;
    if (!status)
        op->coll.tensors[index].result = NULL;
    return status;
}

void bhvd_result_free(void *data) { block_pool_release(&result_memory, data); }

bhvd_status bhvd_received_splits(bhvd_handle *op, size_t index, int32_t *splits, size_t count)
{
    if (!operation_is_complete(op) || op->error.status || index >= op->coll.args.tensor_count || !op->received_splits ||
        count != op->received_size)
        return BHVD_ERR_ARGUMENT;
    memcpy(splits, op->received_splits + index * count, count * sizeof *splits);
    return BHVD_OK;
}

bhvd_status bhvd_handle_join(bhvd_handle *op, void *stream, struct bhvd_error *error)
{
    if (!operation_is_complete(op))
        return error_set(error, BHVD_ERR_ARGUMENT, "the operation has not ended: wait for it first");
    if (op->error.status || !op->coll.staging)
        return op->error.status;
    return staging_join(op->coll.staging, stream, error);
}

bhvd_status bhvd_result_copy(bhvd_handle *op, size_t index, void *dst, void *stream, struct bhvd_error *error)
{
    if (!operation_is_complete(op) || op->error.status)
        return error_set(error, BHVD_ERR_ARGUMENT, "the operation has no result %zu on a GPU", index);
    return staging_copy_result(&op->coll, index, dst, stream, error);
}

// ------------------------------------------------------------------------------------------------------- work on a GPU

// Waiting for the GPU work of ended operations reports its failures. Operations end when their work is enqueued (gpu/nccl.h,
// gpu/staging.h), so callers that keep their results, for instance in a checkpoint, call this first.
//
// After the streams have drained the outcome is known: a failure aborts communicators only after the context has failed, so
// a stream released by a failure is never mistaken for one that completed its work.
enum { POLL_AGAIN_NS = 50000 };

static bhvd_status failure_of(bhvd_context *ctx, struct bhvd_error *error)
{
    *error = executor_failure(&ctx->exec);
    if (error->status == BHVD_ERR_SHUTDOWN)     // this rank left after finishing its operations
        error_clear(error);
    return error->status;
}

// Waits until the stream has completed its current work or the context fails.
static int wait_for(bhvd_context *ctx, struct bhvd_device *device, void *event, void *stream, struct bhvd_error *error)
{
    const struct timespec pause = {0, POLL_AGAIN_NS};
    int code = device->ops->event_record(device, event, stream);
    while (!code && (code = device->ops->event_query(device, event)) == DEVICE_NOT_READY && !failure_of(ctx, error)) {
        nanosleep(&pause, NULL);
        code = 0;
    }
    return code == DEVICE_NOT_READY ? 0 : code;
}

bhvd_status bhvd_context_wait_gpu(bhvd_context *ctx, bhvd_device *device, struct bhvd_error *error)
{
    struct bhvd_error unused;
    void *event = NULL;
    if (!error)
        error = &unused;
    error_clear(error);
    if (ctx->abandoned)
        return error_set(error, BHVD_ERR_SHUTDOWN, "the GPU belongs to the parent of this forked process");
    int code = device->ops->event_create(device, &event);
    if (!code)
        code = wait_for(ctx, device, event, device->to_host, error);
    if (!code)
        code = wait_for(ctx, device, event, device->from_host, error);
    if (event)
        device->ops->event_destroy(device, event);
    // NCCL errors that have not been noticed yet. A thread that runs the engine checks by itself.
    if (!code && pthread_mutex_trylock(&ctx->engine_lock) == 0) {
        communicators_check(ctx);
        pthread_mutex_unlock(&ctx->engine_lock);
    }
    if (failure_of(ctx, error))                 // the cause; the driver only reports a consequence
        return error->status;
    return code ? device_failed(device, code, "work of earlier operations failed", error) : BHVD_OK;
}
