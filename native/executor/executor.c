#include "executor/executor.h"

#include "base/clock.h"
#include "base/status.h"

struct block_pool result_memory = BLOCK_POOL(RESULT_MEMORY_KEPT);

size_t collective_nbytes(const struct collective *coll)
{
    size_t nbytes = 0;
    for (size_t t = 0; t < coll->args.tensor_count; t++)
        nbytes += coll->tensors[t].nbytes;
    return nbytes;
}

void executor_init(struct executor *exec, const struct executor_callbacks *callbacks, bhvd_context *ctx)
{
    exec->callbacks = callbacks;
    exec->ctx = ctx;
    exec->memory = (struct block_pool)BLOCK_POOL(SIZE_MAX);
    pthread_mutex_init(&exec->failure_lock, NULL);
    kernel_table_init(&exec->kernels, cpu_features());
}

void executor_fini(struct executor *exec)
{
    block_pool_trim(&exec->memory, CLOCK_NEVER);
    pthread_mutex_destroy(&exec->failure_lock);
}

void executor_after_fork(struct executor *exec) { pthread_mutex_init(&exec->failure_lock, NULL); }

bhvd_status executor_fail_with(struct executor *exec, const struct bhvd_error *error)
{
    pthread_mutex_lock(&exec->failure_lock);
    const bool is_first = !exec->failure.status;
    if (is_first)
        exec->failure = *error;
    pthread_mutex_unlock(&exec->failure_lock);
    if (is_first)
        exec->callbacks->failed(exec->ctx, error);
    return exec->failure.status;
}

bhvd_status executor_blame(struct executor *exec, bhvd_status status, bhvd_cause cause, int rank, const char *format, ...)
{
    struct bhvd_error error;
    va_list args;
    va_start(args, format);
    error_vset(&error, status, format, args);
    va_end(args);
    error_blame(&error, cause, rank);
    return executor_fail_with(exec, &error);
}

bhvd_status executor_fail_protocol(struct executor *exec, int rank)
{
    return executor_blame(exec, BHVD_ERR_SYSTEM, BHVD_CAUSE_PROTOCOL, rank, "rank %d sent something that breaks the protocol; "
                          "do all ranks run the same version and the same program?", rank);
}

bhvd_status executor_fail_departed(struct executor *exec, int rank)
{
    return executor_blame(exec, BHVD_ERR_PEER_LOST, BHVD_CAUSE_LEFT, rank,
                          "rank %d left the job while an operation still needed it", rank);
}

bhvd_status executor_allocate_result(struct executor *exec, struct tensor *tensor, int64_t dim0)
{
    tensor->result_dim0 = dim0;
    tensor->result_nbytes = (size_t)dim0 * tensor->row_nbytes;
    if (tensor->dst || tensor->result_nbytes == 0)
        return BHVD_OK;
    tensor->result = block_pool_acquire(&result_memory, tensor->result_nbytes);
    tensor->dst = tensor->result;
    return tensor->result ? BHVD_OK
                          : executor_fail(exec, BHVD_ERR_SYSTEM, "no memory for a result of %zu bytes", tensor->result_nbytes);
}

// Few different sizes, so that memory is reused although the tensors that are fused differ from step to step.
void *executor_acquire(struct executor *exec, size_t nbytes)
{
    return block_pool_acquire(&exec->memory, size_double_up(nbytes, BLOCK_SMALLEST_KEPT));
}

struct bhvd_error executor_failure(struct executor *exec)
{
    pthread_mutex_lock(&exec->failure_lock);
    struct bhvd_error failure = exec->failure;
    pthread_mutex_unlock(&exec->failure_lock);
    return failure;
}
