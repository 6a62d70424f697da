#include "run/run.h"

#include <stdio.h>
#include <stdlib.h>

#include "run/fusion.h"

void run_init(struct run *run, const struct run_duties *duties, void *owner)
{
    run->duties = duties;
    run->owner = owner;
    pthread_mutex_init(&run->failure_lock, NULL);
    kernel_table_init(&run->kernels, cpu_features());
}

void run_fini(struct run *run)
{
    fusion_fini(run);
    free(run->poll_fds);
    pthread_mutex_destroy(&run->failure_lock);
}

void run_after_fork(struct run *run) { pthread_mutex_init(&run->failure_lock, NULL); }

bhvd_status run_vfail(struct run *run, bhvd_status status, const char *format, va_list args)
{
    struct bhvd_error error = {.status = status};
    vsnprintf(error.message, sizeof error.message, format, args);
    pthread_mutex_lock(&run->failure_lock);
    const bool is_first = !run->failure.status;
    if (is_first)
        run->failure = error;
    pthread_mutex_unlock(&run->failure_lock);
    if (is_first)
        run->duties->failed(run->owner, &error);
    return run->failure.status;
}

bhvd_status run_fail(struct run *run, bhvd_status status, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    status = run_vfail(run, status, format, args);
    va_end(args);
    return status;
}

bhvd_status run_fail_protocol(struct run *run, int rank)
{
    return run_fail(run, BHVD_ERR_SYSTEM, "rank %d sent something that breaks the protocol; do all ranks run the same "
                    "version and the same program?", rank);
}

struct bhvd_error run_failure(struct run *run)
{
    pthread_mutex_lock(&run->failure_lock);
    struct bhvd_error failure = run->failure;
    pthread_mutex_unlock(&run->failure_lock);
    return failure;
}
