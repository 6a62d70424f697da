#include "tensorflow/completion.h"

#include "base/thread.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static size_t in_flight;
static bhvd_completions *ended;         /* lives as long as the process, like the thread that reads from it */
static bool running;

/* ------------------------------------------------------------------------------------------------------- done ---- */

/* The callback is a std::function<void()>; TensorFlow passes the address of a parameter, an object on the caller's
 * stack that dies when the kernel returns. So it is moved like its move constructor does: the words are copied and the
 * original is emptied. The layout is libstdc++'s: two words of storage, the manager, the invoker. */
enum { FUNCTION_MANAGER = 2, FUNCTION_INVOKER = 3 };
enum { MANAGER_DESTROY = 3 };
typedef bool function_manager(void *self, const void *source, int operation);

/* The caller's frame is at most this far up the stack. */
#define CALLER_DISTANCE (64 * 1024)

static bool is_code(void *address)
{
    Dl_info info;
    return address && dladdr(address, &info);
}

/* Checked once: all callbacks have the same layout, and dladdr takes half a millisecond in a library of this size. */
static bool layout_is_understood(void *const *words)
{
    enum { UNKNOWN, NO, YES };
    static atomic_int understood;
    int known = atomic_load(&understood);
    if (known == UNKNOWN) {
        known = is_code(words[FUNCTION_MANAGER]) && is_code(words[FUNCTION_INVOKER]) ? YES : NO;
        atomic_store(&understood, known);
    }
    return known == YES;
}

bool done_keep(struct done *done, TF_AsyncOpKernelDoneCallback *callback)
{
    uintptr_t here = (uintptr_t)__builtin_frame_address(0), there = (uintptr_t)callback;
    done->callback = callback;
    done->moved = false;
    if (there < here || there - here > CALLER_DISTANCE)
        return true;                    /* not on the stack: it lives until it is called */
    void **words = (void **)callback;
    if (!layout_is_understood(words))
        return false;
    memcpy(done->storage, words, sizeof done->storage);
    words[FUNCTION_MANAGER] = words[FUNCTION_INVOKER] = NULL;
    done->moved = true;
    return true;
}

static void done_run(struct done *done)
{
    if (!done->moved) {
        tf.RunAsyncOpKernelDoneCallback(done->callback);
        return;
    }
    tf.RunAsyncOpKernelDoneCallback((TF_AsyncOpKernelDoneCallback *)done->storage);
    ((function_manager *)done->storage[FUNCTION_MANAGER])(done->storage, done->storage, MANAGER_DESTROY);
}

/* -------------------------------------------------------------------------------------------------- completion ---- */

void completion_begin(void)
{
    pthread_mutex_lock(&lock);
    in_flight++;
    pthread_mutex_unlock(&lock);
}

void completion_end(void)
{
    pthread_mutex_lock(&lock);
    if (--in_flight == 0)
        pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
}

static void complete(struct completion *completion, bhvd_status status, const struct bhvd_error *error)
{
    struct done done = completion->done;
    completion->finish(completion, status, error);
    completion_end();
    done_run(&done);
}

static void *run(void *unused)
{
    (void)unused;
    struct bhvd_error error;
    for (;;) {
        struct completion *completion = (struct completion *)(intptr_t)core.completions_next(ended, -1);
        bhvd_status status = core.wait(completion->handle, 0, &error);
        complete(completion, status, &error);
    }
    return NULL;
}

static bool ensure_running(void)
{
    pthread_t thread;
    pthread_mutex_lock(&lock);
    if (!ended)
        ended = core.completions_create();
    if (ended && !running && thread_create(&thread, run, NULL) == 0) {
        pthread_detach(thread);
        running = true;
    }
    bool runs = running;
    pthread_mutex_unlock(&lock);
    return runs;
}

void completion_add(struct completion *completion)
{
    if (!ensure_running() || core.completions_add(ended, completion->handle, (int64_t)(intptr_t)completion) != BHVD_OK)
        completion_wait(completion);
}

void completion_wait(struct completion *completion)
{
    struct bhvd_error error;
    bhvd_status status = core.wait(completion->handle, -1, &error);
    complete(completion, status, &error);
}

void completion_drain(void)
{
    pthread_mutex_lock(&lock);
    while (in_flight)
        pthread_cond_wait(&changed, &lock);
    pthread_mutex_unlock(&lock);
}
