// Public functions on posted operations.
#include "base/clock.h"
#include "base/status.h"
#include "core/context/context.h"
#include "core/api/progress.h"
#include "core/context/completions.h"
#include "core/context/operation.h"
#include "device/buffer.h"
#include "gpu/staging.h"

bhvd_status bhvd_wait(bhvd_handle *op, int timeout_ms, struct bhvd_error *error)
{
    if (!operation_is_complete(op) && op->ctx->abandoned)
        return error_set(error, BHVD_ERR_SHUTDOWN, "operation '%.*s' belongs to the parent of this forked process",
                         (int)op->coll.name_size, op->coll.name);
    if (!operation_is_complete(op))
        progress_wait(op, clock_deadline_ns(timeout_ms));
    if (!operation_is_complete(op))
        return error_set(error, BHVD_IN_PROGRESS, "operation '%.*s' is in progress", (int)op->coll.name_size, op->coll.name);
    if (error)
        *error = op->error;
    return op->error.status;
}

int bhvd_poll(bhvd_handle *op) { return operation_is_complete(op); }

int64_t bhvd_handle_value(bhvd_handle *op) { return op->value; }

void bhvd_handle_drop(bhvd_handle *op) { operation_release(op); }

bhvd_status bhvd_result(bhvd_handle *op, size_t index, struct bhvd_result *out)
{
    if (!operation_is_complete(op) || op->error.status || index >= op->coll.tensor_count)
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
    if (!operation_is_complete(op) || op->error.status || index >= op->coll.tensor_count || !op->received_splits ||
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

bhvd_status bhvd_completions_add(bhvd_completions *list, bhvd_handle *op, int64_t number)
{
    bhvd_status status = completions_add(&op->completion, list, number);
    // Either this thread or the thread that ends the operation sees the other's mark.
    if (!status && operation_is_complete(op))
        completions_signal(&op->completion);
    return status;
}
