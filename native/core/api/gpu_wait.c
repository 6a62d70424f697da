// Waits for the GPU work of ended operations and reports its failures. Operations end when their work is enqueued (gpu/nccl.h,
// gpu/staging.h), so callers that keep their results, for instance in a checkpoint, call this first.
//
// After the streams have drained the outcome is known: a failure aborts communicators only after the context has failed, so
// a stream released by a failure is never mistaken for one that completed its work.
#include <time.h>

#include "base/status.h"
#include "core/engine/communicators.h"
#include "device/device.h"

enum { POLL_AGAIN_NS = 50000 };

static bhvd_status failure_of(bhvd_context *ctx, struct bhvd_error *error)
{
    *error = executor_failure(&ctx->exec);
    if (error->status == BHVD_ERR_SHUTDOWN)     // this rank left after finishing its operations
        error_clear(error);
    return error->status;
}

// Checks for NCCL errors that have not been noticed yet. A thread that runs the engine checks by itself.
static void check_failures(bhvd_context *ctx)
{
    if (pthread_mutex_trylock(&ctx->engine_lock))
        return;
    if (!ctx->exec.failure.status)
        communicators_check(ctx);
    pthread_mutex_unlock(&ctx->engine_lock);
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
    if (!code)
        check_failures(ctx);
    if (failure_of(ctx, error))                 // the cause; the driver only reports a consequence
        return error->status;
    return code ? device_failed(device, code, "work of earlier operations failed", error) : BHVD_OK;
}
