/* A stand-in for libcuda.so.1, for tests on machines without a GPU. It is no CUDA and measures nothing: it has the
 * functions that native/device/cuda.c and the tests use, over memory of this process.
 *
 * What makes it worth testing against:
 *   - "Device" memory lies in an arena that nobody may touch: the pages are PROT_NONE. Copies go through a second mapping
 *     of the same memory; while a kernel runs, the pages are open. Code that reads a device pointer on the host crashes.
 *     An address of ordinary memory with the bit TAG set is device memory as well: no processor reads such an address.
 *   - Each stream is a thread that works late and takes its time, so that an order nobody asked for shows.
 *   - BHVD_FAKE_CUDA_FAIL_AFTER=n: the n-th copy on a stream fails, and with it all that comes later, as after a fault.
 *
 * Kernels are functions compiled for the CPU (tests/device/emulation.h): struct fake_function. */
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
    OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, ILLEGAL_ADDRESS = 700, NOT_READY = 600,
    ARENA = 1 << 30, ALIGNMENT = 256, PARAMS_MAX = 16
};

static const uintptr_t TAG = (uintptr_t)1 << 62;

/* What a CUfunction points to here. Every parameter takes 8 bytes. */
struct fake_function {
    void (*run)(unsigned blocks, unsigned threads, void **params);
    int param_count;
};

struct event {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    uint64_t recorded, completed;       /* how often */
    struct event *next;                 /* of all there ever were */
};

struct task {
    struct task *next;
    enum { COPY, LAUNCH, RECORD, WAIT, CALL } kind;
    void (*call)(void *);
    void *argument;
    void *dst;
    const void *src;
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
    pthread_t thread;
};

static struct {
    pthread_mutex_t lock;
    unsigned char *arena, *alias;
    size_t used;
    int open;                           /* kernels that run now */
    atomic_int failed, copies;
    int fail_after, devices;
    struct stream *default_stream;
    struct event *events;               /* never freed: a stream may still come to one */
    uint64_t launches, link_bytes;
} fake = {.lock = PTHREAD_MUTEX_INITIALIZER, .devices = 8};

static void *visible(const void *p)
{
    uintptr_t at = (uintptr_t)p & ~TAG, base = (uintptr_t)fake.arena;
    return at >= base && at < base + ARENA ? fake.alias + (at - base) : (void *)at;
}

static int is_on_device(const void *p) { return (uintptr_t)p & TAG || visible(p) != p; }

static void open_arena(int step)
{
    pthread_mutex_lock(&fake.lock);
    fake.open += step;
    if (fake.open == (step > 0))
        mprotect(fake.arena, ARENA, step > 0 ? PROT_READ | PROT_WRITE : PROT_NONE);
    pthread_mutex_unlock(&fake.lock);
}

static void run_task(struct task *task)
{
    if (task->kind == COPY) {
        if (atomic_fetch_add(&fake.copies, 1) + 1 >= fake.fail_after && fake.fail_after)
            fake.failed = 1;
        if (!fake.failed)
            memcpy(visible(task->dst), visible(task->src), task->nbytes);
    } else if (task->kind == LAUNCH && !fake.failed) {
        void *params[PARAMS_MAX];
        for (int i = 0; i < PARAMS_MAX; i++)
            params[i] = &task->params[i];
        open_arena(1);
        task->function->run(task->blocks, task->threads, params);
        open_arena(-1);
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
        usleep((unsigned)rand_r(&seed) % 300);          /* late, and never twice as late */
        run_task(task);
        free(task);
        pthread_mutex_lock(&stream->lock);
        stream->busy = 0;
        pthread_cond_broadcast(&stream->changed);
    }
    pthread_mutex_unlock(&stream->lock);
    return NULL;
}

static struct stream *stream_make(void)
{
    struct stream *stream = calloc(1, sizeof *stream);
    stream->tail = &stream->head;
    pthread_mutex_init(&stream->lock, NULL);
    pthread_cond_init(&stream->changed, NULL);
    pthread_create(&stream->thread, NULL, stream_main, stream);
    return stream;
}

static int add(void *handle, struct task task)
{
    struct stream *stream = handle ? handle : fake.default_stream;
    struct task *copy = malloc(sizeof *copy);
    *copy = task;
    copy->next = NULL;
    pthread_mutex_lock(&stream->lock);
    *stream->tail = copy;
    stream->tail = &copy->next;
    pthread_cond_broadcast(&stream->changed);
    pthread_mutex_unlock(&stream->lock);
    return fake.failed ? ILLEGAL_ADDRESS : OK;
}

API int cuInit(unsigned flags)
{
    (void)flags;
    pthread_mutex_lock(&fake.lock);
    if (!fake.arena) {
        int fd = memfd_create("fake_cuda", MFD_CLOEXEC);
        const char *fail = getenv("BHVD_FAKE_CUDA_FAIL_AFTER");
        if (fd < 0 || ftruncate(fd, ARENA))
            abort();
        fake.arena = mmap(NULL, ARENA, PROT_NONE, MAP_SHARED, fd, 0);
        fake.alias = mmap(NULL, ARENA, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        close(fd);
        fake.default_stream = stream_make();
        fake.fail_after = fail ? atoi(fail) : 0;
    }
    pthread_mutex_unlock(&fake.lock);
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

/* GPUs of several processes are the same ones unless BHVD_FAKE_CUDA_UUID says otherwise. */
API int cuDeviceGetUuid_v2(unsigned char *uuid, int device)
{
    const char *text = getenv("BHVD_FAKE_CUDA_UUID");
    memset(uuid, 0, 16);
    snprintf((char *)uuid, 16, "%.8s.%d", text ? text : "fake", device);
    return OK;
}

static _Thread_local int pushed;

API int cuDevicePrimaryCtxRetain(void **context, int device)
{
    (void)device;
    *context = &fake;
    return OK;
}

API int cuDevicePrimaryCtxRelease_v2(int device)
{
    (void)device;
    return OK;
}

API int cuCtxPushCurrent_v2(void *context)
{
    pushed++;
    return context == &fake ? OK : INVALID_VALUE;
}

API int cuCtxPopCurrent_v2(void **context)
{
    *context = &fake;
    return pushed-- > 0 ? OK : INVALID_VALUE;
}

API int cuCtxGetStreamPriorityRange(int *least, int *greatest)
{
    *least = 0;
    *greatest = -5;
    return pushed ? OK : INVALID_VALUE;
}

API int cuMemHostAlloc(void **memory, size_t nbytes, unsigned flags)
{
    if (!pushed || flags > 7)
        return INVALID_VALUE;
    return posix_memalign(memory, 4096, nbytes) ? OUT_OF_MEMORY : OK;
}

API int cuMemFreeHost(void *memory)
{
    free(memory);
    return OK;
}

/* Never given back: tests are short. */
API int cuMemAlloc_v2(void **out, size_t nbytes)
{
    pthread_mutex_lock(&fake.lock);
    size_t size = (nbytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    int fits = fake.used + size <= ARENA;
    *out = fake.arena + fake.used;
    fake.used += fits ? size : 0;
    pthread_mutex_unlock(&fake.lock);
    return fits ? OK : OUT_OF_MEMORY;
}

API int cuMemFree_v2(void *memory)
{
    (void)memory;
    return OK;
}

API int cuMemcpyAsync(void *dst, const void *src, size_t nbytes, void *stream)
{
    if (is_on_device(dst) != is_on_device(src))
        __atomic_fetch_add(&fake.link_bytes, nbytes, __ATOMIC_RELAXED);
    return add(stream, (struct task){.kind = COPY, .dst = dst, .src = src, .nbytes = nbytes});
}

API int cuStreamCreateWithPriority(void **stream, unsigned flags, int priority)
{
    if (!pushed || flags != 1 || priority != -5)
        return INVALID_VALUE;
    *stream = stream_make();
    return OK;
}

API int cuStreamCreate(void **stream, unsigned flags)
{
    (void)flags;
    *stream = stream_make();
    return OK;
}

API int cuStreamSynchronize(void *handle)
{
    struct stream *stream = handle ? handle : fake.default_stream;
    pthread_mutex_lock(&stream->lock);
    while (stream->head || stream->busy)
        pthread_cond_wait(&stream->changed, &stream->lock);
    pthread_mutex_unlock(&stream->lock);
    return fake.failed ? ILLEGAL_ADDRESS : OK;
}

API int cuStreamDestroy_v2(void *handle)
{
    struct stream *stream = handle;
    pthread_mutex_lock(&stream->lock);
    stream->closing = 1;
    pthread_cond_broadcast(&stream->changed);
    pthread_mutex_unlock(&stream->lock);
    pthread_join(stream->thread, NULL);
    free(stream);
    return OK;
}

/* Of the stand-in only: whether the stream says that a graph is captured from it. */
API void fake_cuda_set_capturing(void *stream, int capturing) { ((struct stream *)stream)->capturing = capturing; }
/* Of the stand-in only: the stream stops here until the event is recorded again. */
API void fake_cuda_hold(void *stream, struct event *event)
{
    pthread_mutex_lock(&event->lock);
    uint64_t ticket = event->recorded + 1;
    pthread_mutex_unlock(&event->lock);
    add(stream, (struct task){.kind = WAIT, .event = event, .ticket = ticket});
}

/* Of the stand-in only: how many GPUs it has; they share all memory. */
API void fake_cuda_set_devices(int devices) { fake.devices = devices; }

void fake_cuda_call(void *stream, void (*fn)(void *), void *arg)
{
    add(stream, (struct task){.kind = CALL, .call = fn, .argument = arg});
}

void *fake_cuda_visible(const void *p) { return visible(p); }
int fake_cuda_is_current(void) { return pushed > 0; }

/* Of the stand-in only: copies made, kernels launched, bytes asked to be copied between host and device so far. */
API int fake_cuda_copies(void) { return fake.copies; }
API uint64_t fake_cuda_launches(void) { return __atomic_load_n(&fake.launches, __ATOMIC_RELAXED); }
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
    event->next = fake.events;
    fake.events = event;
    pthread_mutex_unlock(&fake.lock);
    *out = event;
    return pushed && flags == 2 ? OK : INVALID_VALUE;
}

API int cuEventDestroy_v2(void *event)
{
    (void)event;
    return OK;
}

API int cuEventRecord(void *handle, void *stream)
{
    struct event *event = handle;
    pthread_mutex_lock(&event->lock);
    uint64_t ticket = ++event->recorded;
    pthread_mutex_unlock(&event->lock);
    return add(stream, (struct task){.kind = RECORD, .event = event, .ticket = ticket});
}

API int cuStreamWaitEvent(void *stream, void *handle, unsigned flags)
{
    struct event *event = handle;
    pthread_mutex_lock(&event->lock);
    uint64_t ticket = event->recorded;
    pthread_mutex_unlock(&event->lock);
    return flags ? INVALID_VALUE : add(stream, (struct task){.kind = WAIT, .event = event, .ticket = ticket});
}

API int cuEventQuery(void *handle)
{
    struct event *event = handle;
    pthread_mutex_lock(&event->lock);
    int done = event->completed >= event->recorded;
    pthread_mutex_unlock(&event->lock);
    return fake.failed ? ILLEGAL_ADDRESS : done ? OK : NOT_READY;
}

API int cuEventSynchronize(void *handle)
{
    struct event *event = handle;
    pthread_mutex_lock(&event->lock);
    while (event->completed < event->recorded)
        pthread_cond_wait(&event->changed, &event->lock);
    pthread_mutex_unlock(&event->lock);
    return fake.failed ? ILLEGAL_ADDRESS : OK;
}

API int cuLaunchKernel(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                       unsigned block_y, unsigned block_z, unsigned shared_nbytes, void *stream, void **params,
                       void **extra)
{
    struct task task = {.kind = LAUNCH, .function = function, .blocks = grid_x, .threads = block_x};
    if (!pushed || grid_y != 1 || grid_z != 1 || block_y != 1 || block_z != 1 || shared_nbytes || extra)
        return INVALID_VALUE;
    for (int i = 0; i < task.function->param_count; i++)
        memcpy(&task.params[i], params[i], sizeof task.params[i]);
    __atomic_fetch_add(&fake.launches, 1, __ATOMIC_RELAXED);
    return add(stream, task);
}

API int cuGetErrorName(int code, const char **text)
{
    *text = code == ILLEGAL_ADDRESS ? "CUDA_ERROR_ILLEGAL_ADDRESS" : code == INVALID_VALUE ? "CUDA_ERROR_INVALID_VALUE" : "CUDA_ERROR_UNKNOWN";
    return OK;
}

API int cuGetErrorString(int code, const char **text)
{
    *text = code == ILLEGAL_ADDRESS ? "an illegal memory access was encountered" : "something else";
    return OK;
}
