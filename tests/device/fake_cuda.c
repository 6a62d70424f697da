/* A fake libcuda.so.1, for tests on machines without a GPU. It emulates the functions that native/device/cuda.c and the tests
 * use, in memory of this process. Its timings mean nothing.
 *
 * It refuses, waits and fails where a real driver does:
 *   - The memory of each GPU lies in an arena whose pages are PROT_NONE. Copies go through a second mapping of the same memory;
 *     while a kernel runs, the pages are open. Code that reads a device pointer on the host crashes. An address of ordinary
 *     memory with the bit TAG set is device memory as well: no processor reads such an address.
 *   - A kernel reaches allocated memory of its own GPU only. A real one could reach pinned memory, but each access would cross
 *     the link.
 *   - Each GPU has a context. A stream, a kernel or an event of a context that is not current is refused.
 *   - Each stream is a thread with random delays, so that missing synchronization shows.
 *   - A copy to pageable memory returns when it is done; one from pageable memory has read its source when it returns.
 *   - Allocating pinned memory, and freeing any, waits for all work of the GPU; see fake_cuda_set_allocations_wait.
 *   - While a thread captures a graph in the global mode, calls such as cuEventQuery fail on all threads that have not
 *     exchanged their mode, and invalidate the capture.
 *   - BHVD_FAKE_CUDA_FAIL_AFTER=n: the n-th copy on a stream fails, and with it all later work, as after a fault. A kernel
 *     that faults does the same.
 *
 * Kernels are functions for the CPU, made of PTX (tests/support/ptx.py) or written by a test: struct fake_function. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "fake_cuda.h"

#define API __attribute__((visibility("default")))
enum {
    OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, INVALID_CONTEXT = 201, INVALID_HANDLE = 400, NOT_READY = 600,
    ILLEGAL_ADDRESS = 700, CAPTURE_UNSUPPORTED = 900, CAPTURE_INVALIDATED = 901,
    DEVICES_MAX = 8, ARENA = 1 << 30, ALIGNMENT = 256, PARAMS_MAX = 16, STACK_MAX = 16
};
#define ALL_ARENAS ((size_t)DEVICES_MAX * ARENA)

static const uintptr_t TAG = (uintptr_t)1 << 62;

/* A kernel's code. Every parameter takes 8 bytes. Returns 0, or the driver's error code. */
struct fake_function {
    int (*run)(unsigned blocks, unsigned threads, void **params, int (*reaches)(uint64_t address, size_t nbytes));
    int param_count;
};

/* The target of a CUfunction. */
struct kernel {
    const struct fake_function *function;
    struct context *context;
    struct kernel *next;            // list of all kernels, so that none is a leak
};
static struct kernel *_Atomic kernels;

struct event {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    uint64_t recorded, completed;       /* numbers of records */
    uint64_t asked;                     /* the number of the record that was last queried */
    struct context *context;
    struct event *next;                 /* list of all events */
};

struct task {
    struct task *next;
    enum { COPY, LAUNCH, RECORD, WAIT, CALL } kind;
    void (*call)(void *);
    void *argument;
    void *dst;
    const void *src;
    void *owned;                        /* the copy of a pageable source */
    size_t nbytes;
    const struct fake_function *function;
    unsigned blocks, threads;
    uint64_t params[PARAMS_MAX];
    struct event *event;
    uint64_t ticket;
};

struct stream {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    struct task *head, **tail;
    int busy, closing, capturing;
    struct context *context;
    struct stream *next;                /* list of the context's streams, never freed */
    pthread_t thread;
};

struct context {
    int device;
    size_t used;                        /* of its arena, in bytes */
    struct stream *streams, *default_stream;
};

struct pinned {
    unsigned char *data;
    size_t nbytes;
    struct pinned *next;
};

static struct {
    pthread_mutex_t lock;
    unsigned char *arena, *alias;
    uint16_t *valid;                    /* the allocated bytes in each block of ALIGNMENT bytes */
    struct context contexts[DEVICES_MAX];
    struct pinned *pinned;
    size_t pinned_bytes;
    int open;                           /* running kernels */
    atomic_int failed, copies, captures, invalidated, allocations_wait;
    int fail_after, devices;
    struct event *events;               /* never freed: a stream may still use one */
    uint64_t launches, link_bytes, asked;
} fake = {.lock = PTHREAD_MUTEX_INITIALIZER, .devices = DEVICES_MAX};

static _Thread_local struct context *stack[STACK_MAX];
static _Thread_local int depth;
static _Thread_local int capture_mode;  /* 0: global, 1: thread-local, 2: relaxed */

static struct context *current(void) { return depth ? stack[depth - 1] : NULL; }

static int refuse(int code, const char *why)
{
    fprintf(stderr, "fake_cuda: %s\n", why);
    return code;
}

/* Fails where a capture in the global mode forbids a call on all threads. */
static int forbidden(void)
{
    if (!atomic_load(&fake.captures) || capture_mode != 0)
        return OK;
    atomic_store(&fake.invalidated, 1);
    return CAPTURE_UNSUPPORTED;
}

/* ------------------------------------------------------------------------------------------------------- memory */

static int in_arena(uintptr_t at) { return at >= (uintptr_t)fake.arena && at < (uintptr_t)fake.arena + ALL_ARENAS; }

static void *visible(const void *p)
{
    uintptr_t at = (uintptr_t)p & ~TAG;
    return in_arena(at) ? fake.alias + (at - (uintptr_t)fake.arena) : (void *)at;
}

static int is_on_device(const void *p) { return (uintptr_t)p & TAG || in_arena((uintptr_t)p); }

static int is_allocated(uint64_t address, size_t nbytes)
{
    const size_t begin = address - (uintptr_t)fake.arena, end = begin + nbytes;
    for (size_t at = begin; at < end; at = (at / ALIGNMENT + 1) * ALIGNMENT) {
        const size_t stop = end - at / ALIGNMENT * ALIGNMENT;
        if (__atomic_load_n(&fake.valid[at / ALIGNMENT], __ATOMIC_RELAXED) < (stop < ALIGNMENT ? stop : ALIGNMENT))
            return 0;
    }
    return 1;
}

static int is_pinned(uintptr_t address, size_t nbytes)
{
    int found = 0;
    pthread_mutex_lock(&fake.lock);
    for (const struct pinned *p = fake.pinned; p && !found; p = p->next)
        found = address >= (uintptr_t)p->data && address + nbytes <= (uintptr_t)p->data + p->nbytes;
    pthread_mutex_unlock(&fake.lock);
    return found;
}

static _Thread_local const struct context *running;     /* the context of the kernel on this thread */

/* Whether the running kernel may access the memory. */
static int reaches(uint64_t address, size_t nbytes)
{
    return in_arena(address) && (address - (uintptr_t)fake.arena) / ARENA == (size_t)running->device &&
           is_allocated(address, nbytes);
}

static void open_arenas(int step)
{
    pthread_mutex_lock(&fake.lock);
    fake.open += step;
    if (fake.open == (step > 0))
        mprotect(fake.arena, ALL_ARENAS, step > 0 ? PROT_READ | PROT_WRITE : PROT_NONE);
    pthread_mutex_unlock(&fake.lock);
}

/* ------------------------------------------------------------------------------------------------------ streams */

static void run_kernel(const struct stream *stream, struct task *task)
{
    void *params[PARAMS_MAX];
    for (int i = 0; i < PARAMS_MAX; i++)
        params[i] = &task->params[i];
    open_arenas(1);
    running = stream->context;
    const int code = task->function->run(task->blocks, task->threads, params, reaches);
    if (code)
        atomic_store(&fake.failed, code);
    open_arenas(-1);
}

static void run_task(const struct stream *stream, struct task *task)
{
    if (task->kind == COPY) {
        if (atomic_fetch_add(&fake.copies, 1) + 1 >= fake.fail_after && fake.fail_after)
            fake.failed = ILLEGAL_ADDRESS;
        if (!fake.failed)
            memcpy(visible(task->dst), visible(task->src), task->nbytes);
        free(task->owned);
    } else if (task->kind == LAUNCH && !fake.failed) {
        run_kernel(stream, task);
    } else if (task->kind == CALL) {
        task->call(task->argument);
    } else if (task->kind == WAIT) {
        pthread_mutex_lock(&task->event->lock);
        while (task->event->completed < task->ticket)
            pthread_cond_wait(&task->event->changed, &task->event->lock);
        pthread_mutex_unlock(&task->event->lock);
    } else if (task->kind == RECORD) {
        pthread_mutex_lock(&task->event->lock);
        if (task->event->completed < task->ticket)
            task->event->completed = task->ticket;
        pthread_cond_broadcast(&task->event->changed);
        pthread_mutex_unlock(&task->event->lock);
    }
}

static void *stream_main(void *arg)
{
    struct stream *stream = arg;
    unsigned seed = (unsigned)(uintptr_t)stream;
    pthread_mutex_lock(&stream->lock);
    for (;;) {
        while (!stream->head && !stream->closing)
            pthread_cond_wait(&stream->changed, &stream->lock);
        struct task *task = stream->head;
        if (!task)
            break;
        stream->head = task->next;
        if (!stream->head)
            stream->tail = &stream->head;
        stream->busy = 1;
        pthread_mutex_unlock(&stream->lock);
        usleep((unsigned)rand_r(&seed) % 300);          /* a random delay */
        run_task(stream, task);
        free(task);
        pthread_mutex_lock(&stream->lock);
        stream->busy = 0;
        pthread_cond_broadcast(&stream->changed);
    }
    pthread_mutex_unlock(&stream->lock);
    return NULL;
}

static struct stream *stream_make(struct context *context)
{
    struct stream *stream = calloc(1, sizeof *stream);
    stream->tail = &stream->head;
    stream->context = context;
    pthread_mutex_init(&stream->lock, NULL);
    pthread_cond_init(&stream->changed, NULL);
    pthread_create(&stream->thread, NULL, stream_main, stream);
    pthread_mutex_lock(&fake.lock);
    stream->next = context->streams;
    context->streams = stream;
    pthread_mutex_unlock(&fake.lock);
    return stream;
}

static struct stream *stream_of(void *handle)
{
    return handle ? handle : (current() ? current() : &fake.contexts[0])->default_stream;
}

static int add(struct stream *stream, struct task task)
{
    struct task *copy = malloc(sizeof *copy);
    *copy = task;
    copy->next = NULL;
    pthread_mutex_lock(&stream->lock);
    *stream->tail = copy;
    stream->tail = &copy->next;
    pthread_cond_broadcast(&stream->changed);
    pthread_mutex_unlock(&stream->lock);
    return fake.failed;
}

static void wait_for_stream(struct stream *stream)
{
    pthread_mutex_lock(&stream->lock);
    while (stream->head || stream->busy)
        pthread_cond_wait(&stream->changed, &stream->lock);
    pthread_mutex_unlock(&stream->lock);
}

void fake_cuda_wait_for_device(void)
{
    pthread_mutex_lock(&fake.lock);
    struct stream *streams = current()->streams;
    pthread_mutex_unlock(&fake.lock);
    for (struct stream *stream = streams; stream; stream = stream->next)
        wait_for_stream(stream);
}

/* ------------------------------------------------------------------------------------------ devices and contexts */

API int cuInit(unsigned flags)
{
    (void)flags;
    pthread_mutex_lock(&fake.lock);
    const int first = !fake.arena;
    if (first) {
        int fd = memfd_create("fake_cuda", MFD_CLOEXEC);
        const char *fail = getenv("BHVD_FAKE_CUDA_FAIL_AFTER");
        if (fd < 0 || ftruncate(fd, (off_t)ALL_ARENAS))
            abort();
        fake.arena = mmap(NULL, ALL_ARENAS, PROT_NONE, MAP_SHARED | MAP_NORESERVE, fd, 0);
        fake.alias = mmap(NULL, ALL_ARENAS, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
        fake.valid = mmap(NULL, ALL_ARENAS / ALIGNMENT * sizeof *fake.valid, PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        close(fd);
        fake.fail_after = fail ? atoi(fail) : 0;
    }
    pthread_mutex_unlock(&fake.lock);
    for (int device = 0; device < DEVICES_MAX && first; device++) {
        fake.contexts[device].device = device;
        fake.contexts[device].default_stream = stream_make(&fake.contexts[device]);
    }
    return OK;
}

API int cuDriverGetVersion(int *version)
{
    const char *text = getenv("BHVD_FAKE_CUDA_VERSION");
    *version = text ? atoi(text) : 13000;
    return OK;
}

API int cuDeviceGetCount(int *count)
{
    *count = fake.devices;
    return OK;
}

API int cuDeviceGet(int *device, int ordinal)
{
    *device = ordinal;
    return OK;
}

/* All processes see the same GPUs unless BHVD_FAKE_CUDA_UUID differs. */
API int cuDeviceGetUuid_v2(unsigned char *uuid, int device)
{
    const char *text = getenv("BHVD_FAKE_CUDA_UUID");
    memset(uuid, 0, 16);
    snprintf((char *)uuid, 16, "%.8s.%d", text ? text : "fake", device);
    return OK;
}

API int cuDevicePrimaryCtxRetain(void **context, int device)
{
    *context = &fake.contexts[device];
    return OK;
}

API int cuDevicePrimaryCtxRelease_v2(int device)
{
    (void)device;
    return OK;
}

API int cuCtxPushCurrent_v2(void *context)
{
    if (depth == STACK_MAX)
        return refuse(INVALID_VALUE, "too many contexts are pushed");
    stack[depth++] = context;
    return OK;
}

API int cuCtxPopCurrent_v2(void **context)
{
    if (!depth)
        return refuse(INVALID_CONTEXT, "no context is current");
    *context = stack[--depth];
    return OK;
}

API int cuCtxGetStreamPriorityRange(int *least, int *greatest)
{
    *least = 0;
    *greatest = -5;
    return depth ? OK : INVALID_CONTEXT;
}

API int cuThreadExchangeStreamCaptureMode(int *mode)
{
    const int before = capture_mode;
    capture_mode = *mode;
    *mode = before;
    return OK;
}

/* ------------------------------------------------------------------------------------------------------- memory */

/* Before memory is allocated or freed: whether that is allowed, once all work of the GPU is done. */
static int may_allocate(void)
{
    if (!depth)
        return INVALID_CONTEXT;
    const int code = forbidden();
    if (!code && atomic_load(&fake.allocations_wait))
        fake_cuda_wait_for_device();
    return code;
}

API int cuMemHostAlloc(void **memory, size_t nbytes, unsigned flags)
{
    struct pinned *pinned = malloc(sizeof *pinned);
    int code = flags > 7 ? INVALID_VALUE : may_allocate();
    if (!code && posix_memalign(memory, 4096, nbytes))
        code = OUT_OF_MEMORY;
    if (code) {
        free(pinned);
        return code;
    }
    pthread_mutex_lock(&fake.lock);
    *pinned = (struct pinned){*memory, nbytes, fake.pinned};
    fake.pinned = pinned;
    fake.pinned_bytes += nbytes;
    pthread_mutex_unlock(&fake.lock);
    return OK;
}

API int cuMemFreeHost(void *memory)
{
    const int code = may_allocate();
    if (code)
        return code;
    pthread_mutex_lock(&fake.lock);
    struct pinned **at = &fake.pinned;
    while (*at && (*at)->data != memory)
        at = &(*at)->next;
    struct pinned *found = *at;
    if (found) {
        fake.pinned_bytes -= found->nbytes;
        *at = found->next;
    }
    pthread_mutex_unlock(&fake.lock);
    if (!found)
        return refuse(INVALID_VALUE, "this memory is not pinned");
    free(found->data);
    free(found);
    return OK;
}

/* Addresses are never reused, so every access to freed memory is a fault. */
API int cuMemAlloc_v2(void **out, size_t nbytes)
{
    int code = may_allocate();
    if (code)
        return code;
    struct context *context = current();
    const size_t size = (nbytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT + ALIGNMENT;   /* with a gap */
    pthread_mutex_lock(&fake.lock);
    const size_t begin = (size_t)context->device * ARENA + context->used;
    const int fits = context->used + size <= ARENA;
    context->used += fits ? size : 0;
    pthread_mutex_unlock(&fake.lock);
    for (size_t at = 0; at < nbytes && fits; at += ALIGNMENT)
        __atomic_store_n(&fake.valid[(begin + at) / ALIGNMENT], (uint16_t)(nbytes - at < ALIGNMENT ? nbytes - at : ALIGNMENT),
                         __ATOMIC_RELAXED);
    *out = fake.arena + begin;
    return fits ? OK : OUT_OF_MEMORY;
}

API int cuMemFree_v2(void *memory)
{
    const int code = may_allocate();
    size_t at = ((uintptr_t)memory - (uintptr_t)fake.arena) / ALIGNMENT;
    while (!code && __atomic_load_n(&fake.valid[at], __ATOMIC_RELAXED))
        __atomic_store_n(&fake.valid[at++], 0, __ATOMIC_RELAXED);
    return code;
}

API int cuMemcpyAsync(void *dst, const void *src, size_t nbytes, void *handle)
{
    struct stream *stream = stream_of(handle);
    struct task task = {.kind = COPY, .dst = dst, .src = src, .nbytes = nbytes};
    const int to_device = is_on_device(dst), from_device = is_on_device(src);
    if ((in_arena((uintptr_t)dst) && !is_allocated((uintptr_t)dst, nbytes)) ||
        (in_arena((uintptr_t)src) && !is_allocated((uintptr_t)src, nbytes)))
        return refuse(INVALID_VALUE, "a copy from or to memory that is not allocated");
    if (to_device != from_device)
        __atomic_fetch_add(&fake.link_bytes, nbytes, __ATOMIC_RELAXED);
    if (!from_device && !is_pinned((uintptr_t)src, nbytes)) {
        task.src = task.owned = malloc(nbytes + 1);
        memcpy(task.owned, src, nbytes);
    }
    const int code = add(stream, task);
    if (!to_device && !is_pinned((uintptr_t)dst, nbytes))
        wait_for_stream(stream);
    return code;
}

API int cuStreamCreateWithPriority(void **stream, unsigned flags, int priority)
{
    if (!depth || flags != 1 || priority != -5)
        return INVALID_VALUE;
    *stream = stream_make(current());
    return OK;
}

API int cuStreamCreate(void **stream, unsigned flags)
{
    (void)flags;
    if (!depth)
        return refuse(INVALID_CONTEXT, "a stream needs a context");
    *stream = stream_make(current());
    return OK;
}

API int cuStreamSynchronize(void *handle)
{
    const int code = forbidden();
    if (!code)
        wait_for_stream(stream_of(handle));
    return code ? code : fake.failed;
}

API int cuStreamDestroy_v2(void *handle)
{
    struct stream *stream = handle;
    pthread_mutex_lock(&stream->lock);
    stream->closing = 1;
    pthread_cond_broadcast(&stream->changed);
    pthread_mutex_unlock(&stream->lock);
    pthread_join(stream->thread, NULL);
    return OK;
}

/* Fake only: captures a graph from the stream in the global mode; the end returns whether it is valid. */
API void fake_cuda_begin_capture(struct stream *stream)
{
    stream->capturing = 1;
    atomic_fetch_add(&fake.captures, 1);
}
API int fake_cuda_end_capture(struct stream *stream)
{
    stream->capturing = 0;
    atomic_fetch_sub(&fake.captures, 1);
    return atomic_exchange(&fake.invalidated, 0) ? CAPTURE_INVALIDATED : OK;
}
/* Fake only: the stream waits until the event is recorded again. */
API void fake_cuda_hold(void *stream, struct event *event)
{
    pthread_mutex_lock(&event->lock);
    uint64_t ticket = event->recorded + 1;
    pthread_mutex_unlock(&event->lock);
    add(stream_of(stream), (struct task){.kind = WAIT, .event = event, .ticket = ticket});
}

/* Fake only: sets the number of GPUs. */
API void fake_cuda_set_devices(int devices) { fake.devices = devices; }
/* Fake only: whether allocating and freeing wait for the GPU, as in some drivers. */
API void fake_cuda_set_allocations_wait(int wait) { atomic_store(&fake.allocations_wait, wait); }
/* Fake only: the handle of a kernel in the current context. Never freed. */
API void *fake_cuda_kernel(const struct fake_function *function)
{
    struct kernel *kernel = malloc(sizeof *kernel);
    *kernel = (struct kernel){function, current() ? current() : &fake.contexts[0], NULL};
    kernel->next = atomic_exchange(&kernels, kernel);
    return kernel;
}

void fake_cuda_call(void *stream, void (*fn)(void *), void *arg)
{
    add(stream_of(stream), (struct task){.kind = CALL, .call = fn, .argument = arg});
}

void *fake_cuda_visible(const void *p) { return visible(p); }
int fake_cuda_is_current(void) { return depth > 0; }

/* Fake only: copies made, kernels launched, and bytes of copies between host and device so far. */
API int fake_cuda_copies(void) { return fake.copies; }
API uint64_t fake_cuda_launches(void) { return __atomic_load_n(&fake.launches, __ATOMIC_RELAXED); }
/* Fake only: records queried by cuEventQuery, each counted once. */
API uint64_t fake_cuda_asked(void) { return __atomic_load_n(&fake.asked, __ATOMIC_RELAXED); }
API uint64_t fake_cuda_pinned_bytes(void) { return __atomic_load_n(&fake.pinned_bytes, __ATOMIC_RELAXED); }
API uint64_t fake_cuda_link_bytes(void) { return __atomic_load_n(&fake.link_bytes, __ATOMIC_RELAXED); }

API int cuStreamIsCapturing(void *stream, int *status)
{
    *status = stream && ((struct stream *)stream)->capturing;
    return OK;
}

API int cuEventCreate(void **out, unsigned flags)
{
    struct event *event = calloc(1, sizeof *event);
    pthread_mutex_init(&event->lock, NULL);
    pthread_cond_init(&event->changed, NULL);
    pthread_mutex_lock(&fake.lock);
    event->context = current();
    event->next = fake.events;
    fake.events = event;
    pthread_mutex_unlock(&fake.lock);
    *out = event;
    return depth && flags == 2 ? OK : INVALID_VALUE;
}

API int cuEventDestroy_v2(void *event)
{
    (void)event;
    return OK;
}

API int cuEventRecord(void *handle, void *stream)
{
    struct event *event = handle;
    if (event->context != stream_of(stream)->context)
        return refuse(INVALID_HANDLE, "an event is recorded on a stream of another GPU");
    pthread_mutex_lock(&event->lock);
    uint64_t ticket = ++event->recorded;
    pthread_mutex_unlock(&event->lock);
    return add(stream_of(stream), (struct task){.kind = RECORD, .event = event, .ticket = ticket});
}

API int cuStreamWaitEvent(void *stream, void *handle, unsigned flags)
{
    struct event *event = handle;
    pthread_mutex_lock(&event->lock);
    uint64_t ticket = event->recorded;
    pthread_mutex_unlock(&event->lock);
    return flags ? INVALID_VALUE : add(stream_of(stream), (struct task){.kind = WAIT, .event = event, .ticket = ticket});
}

API int cuEventQuery(void *handle)
{
    struct event *event = handle;
    const int code = forbidden() ? CAPTURE_UNSUPPORTED : fake.failed;
    pthread_mutex_lock(&event->lock);
    if (event->asked != event->recorded)
        __atomic_fetch_add(&fake.asked, 1, __ATOMIC_RELAXED);
    event->asked = event->recorded;
    int done = event->completed >= event->recorded;
    pthread_mutex_unlock(&event->lock);
    return code ? code : done ? OK : NOT_READY;
}

API int cuEventSynchronize(void *handle)
{
    struct event *event = handle;
    if (forbidden())
        return CAPTURE_UNSUPPORTED;
    pthread_mutex_lock(&event->lock);
    while (event->completed < event->recorded)
        pthread_cond_wait(&event->changed, &event->lock);
    pthread_mutex_unlock(&event->lock);
    return fake.failed;
}

API int cuLaunchKernel(void *handle, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                       unsigned block_y, unsigned block_z, unsigned shared_nbytes, void *stream, void **params,
                       void **extra)
{
    const struct kernel *kernel = handle;
    struct task task = {.kind = LAUNCH, .function = kernel->function, .blocks = grid_x, .threads = block_x};
    if (!depth)
        return INVALID_CONTEXT;
    if (kernel->context != stream_of(stream)->context || current() != kernel->context)
        return refuse(INVALID_HANDLE, "a kernel, its stream and the current context are of different GPUs");
    if (grid_y != 1 || grid_z != 1 || block_y != 1 || block_z != 1 || shared_nbytes || extra)
        return INVALID_VALUE;
    for (int i = 0; i < task.function->param_count; i++)
        memcpy(&task.params[i], params[i], sizeof task.params[i]);
    __atomic_fetch_add(&fake.launches, 1, __ATOMIC_RELAXED);
    return add(stream_of(stream), task);
}

static const struct {
    int code;
    const char *name, *text;
} ERRORS[] = {
    {INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {716, "CUDA_ERROR_MISALIGNED_ADDRESS", "misaligned address"},
    {719, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
    {CAPTURE_UNSUPPORTED, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "operation not permitted when stream is capturing"},
    {0, "CUDA_ERROR_UNKNOWN", "something else"},
};

API int cuGetErrorName(int code, const char **text)
{
    int i = 0;
    while (ERRORS[i].code && ERRORS[i].code != code)
        i++;
    *text = ERRORS[i].name;
    return OK;
}

API int cuGetErrorString(int code, const char **text)
{
    int i = 0;
    while (ERRORS[i].code && ERRORS[i].code != code)
        i++;
    *text = ERRORS[i].text;
    return OK;
}
