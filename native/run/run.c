#include "run/run.h"

#include <stdlib.h>

#include "base/status.h"

void run_init(struct run *run, const struct executor_callbacks *callbacks, bhvd_context *owner)
{
    run->callbacks = callbacks;
    run->owner = owner;
    pthread_mutex_init(&run->failure_lock, NULL);
    kernel_table_init(&run->kernels, cpu_features());
}

void run_fini(struct run *run)
{
    buffer_pool_fini(&run->buffers);
    pthread_mutex_destroy(&run->failure_lock);
}

void run_after_fork(struct run *run) { pthread_mutex_init(&run->failure_lock, NULL); }

bhvd_status run_fail_with(struct run *run, const struct bhvd_error *error)
{
    pthread_mutex_lock(&run->failure_lock);
    const bool is_first = !run->failure.status;
    if (is_first)
        run->failure = *error;
    pthread_mutex_unlock(&run->failure_lock);
    if (is_first)
        run->callbacks->failed(run->owner, error);
    return run->failure.status;
}

bhvd_status run_blame(struct run *run, bhvd_status status, bhvd_cause cause, int rank, const char *format, ...)
{
    struct bhvd_error error;
    va_list args;
    va_start(args, format);
    error_vset(&error, status, format, args);
    va_end(args);
    error_blame(&error, cause, rank);
    return run_fail_with(run, &error);
}

bhvd_status run_fail_protocol(struct run *run, int rank)
{
    return run_blame(run, BHVD_ERR_SYSTEM, BHVD_CAUSE_PROTOCOL, rank, "rank %d sent something that breaks the protocol; "
                     "do all ranks run the same version and the same program?", rank);
}

bhvd_status run_fail_left(struct run *run, int rank)
{
    return run_blame(run, BHVD_ERR_PEER_LOST, BHVD_CAUSE_LEFT, rank, "rank %d left the job while an operation still needed it",
                     rank);
}

bhvd_status run_allocate_result(struct run *run, struct tensor *tensor, int64_t dim0)
{
    tensor->result_dim0 = dim0;
    tensor->result_nbytes = (size_t)dim0 * tensor->row_nbytes;
    if (tensor->dst || tensor->result_nbytes == 0)
        return BHVD_OK;
    tensor->result = block_pool_acquire(&result_memory, tensor->result_nbytes);
    tensor->dst = tensor->result;
    return tensor->result ? BHVD_OK
                          : run_fail(run, BHVD_ERR_SYSTEM, "no memory for a result of %zu bytes", tensor->result_nbytes);
}

struct bhvd_error run_failure(struct run *run)
{
    pthread_mutex_lock(&run->failure_lock);
    struct bhvd_error failure = run->failure;
    pthread_mutex_unlock(&run->failure_lock);
    return failure;
}
