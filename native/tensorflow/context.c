#include "tensorflow/core.h"

#include "tensorflow/completion.h"

#include <pthread.h>

#define EXPORT __attribute__((visibility("default")))

struct core core;

static pthread_rwlock_t lock = PTHREAD_RWLOCK_INITIALIZER;
static bhvd_context *context;
static struct core_job current_job;

static const struct { const char *name; void **slot; } wanted[] = {
#define CORE_WANTED(result, name, parameters) { "bhvd_" #name, (void **)&core.name },
    CORE_FUNCTIONS(CORE_WANTED) CORE_PYTHON_FUNCTIONS(CORE_WANTED)
#undef CORE_WANTED
};

/* The name of the index-th function that Python must supply; NULL past the last. */
EXPORT const char *bhvd_tf_wanted(int index)
{
    return index < (int)(sizeof wanted / sizeof *wanted) ? wanted[index].name : NULL;
}

/* Supplies the index-th function. To be called before the first op runs. */
EXPORT void bhvd_tf_supply(int index, void *function) { *wanted[index].slot = function; }

/* Sets the context for later ops; NULL: none. The previous one must live until this and bhvd_tf_drain have returned. */
EXPORT void bhvd_tf_set_context(bhvd_context *new_context, int32_t local_rank, int32_t local_size)
{
    pthread_rwlock_wrlock(&lock);
    context = new_context;
    current_job = (struct core_job){ local_rank, local_size };
    pthread_rwlock_unlock(&lock);
}

/* Blocks until no operation is in progress: afterwards no op uses a context that was set before. */
EXPORT void bhvd_tf_drain(void) { completion_drain(); }

bhvd_context *core_acquire(struct core_job *job)
{
    pthread_rwlock_rdlock(&lock);
    if (job)
        *job = current_job;
    return context;
}

void core_release(void) { pthread_rwlock_unlock(&lock); }
