/* The library that tf.load_op_library loads: finds TensorFlow's API, registers the ops, and takes from Python the core's
 * functions and the context. */
#include "tensorflow/completion.h"
#include "tensorflow/op_kernel.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>

#define EXPORT __attribute__((visibility("default")))

/* ------------------------------------------------------------------------------------------------------ TensorFlow ---- */

struct tf_api tf;

void *tf_api_symbol(const char *library, const char *symbol)
{
    /* By name: Python loads libraries without making their symbols global. NOLOAD: never a second TensorFlow. */
    void *handle = dlopen(library, RTLD_LAZY | RTLD_NOLOAD);
    if (!handle)
        return NULL;
    void *address = dlsym(handle, symbol);
    dlclose(handle);
    return address;
}

/* Looks up all functions. NULL on success, else the name of the missing part: TensorFlow itself, or a function. */
static const char *load_api(void)
{
    static const char library[] = "libtensorflow_framework.so.2";
#define TF_API_FIND(result, name, parameters) \
    *(void **)&tf.name = tf_api_symbol(library, "TF_" #name); \
    if (!tf.name) \
        return "TF_" #name;
    TF_API_FUNCTIONS(TF_API_FIND)
#undef TF_API_FIND
    return NULL;
}

static char problem[512];
static const char *xla_missing;

/* Why the ops are not available: a sentence, or NULL if they are. */
EXPORT const char *bhvd_tf_problem(void) { return problem[0] ? problem : NULL; }

/* The API that this TensorFlow lacks for collectives in programs compiled by XLA, or NULL. */
EXPORT const char *bhvd_tf_xla_missing(void) { return xla_missing; }

__attribute__((constructor)) static void load(void)
{
    const char *missing = load_api();
    if (missing) {
        snprintf(problem, sizeof problem, "the installed TensorFlow has no %s in its C API: bagua_hvd needs "
                 "TensorFlow 2.16 or later", missing);
        return;
    }
    TF_Status *status = tf.NewStatus();
    if (!collective_register(status) || !fact_register(status) || !bridge_register(status))
        snprintf(problem, sizeof problem, "TensorFlow refused the ops of bagua_hvd: %s", tf.Message(status));
    tf.DeleteStatus(status);
    xla_missing = xla_calls_register();
}

/* -------------------------------------------------------------------------------------------------------- the core ---- */

struct core core;

static pthread_rwlock_t lock = PTHREAD_RWLOCK_INITIALIZER;
static bhvd_context *context;
static struct core_job current_job;

static const struct { const char *name; void **slot; } wanted[] = {
#define CORE_WANTED(name) { "bhvd_" #name, (void **)&core.name },
    CORE_FUNCTIONS(CORE_WANTED) CORE_WANTED(python_put) CORE_WANTED(python_wait)
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
