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
    fusion_fini(&run->fusion);
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

struct bhvd_error run_failure(struct run *run)
{
    pthread_mutex_lock(&run->failure_lock);
    struct bhvd_error failure = run->failure;
    pthread_mutex_unlock(&run->failure_lock);
    return failure;
}
