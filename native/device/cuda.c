// NVIDIA's driver, libcuda.so.1, opened at run time; with our own prototypes, no CUDA header.
//
// Uses the device's primary context, like every framework, so that pointers, streams and events of the framework are valid here.
// Each call makes it current for the calling thread, and restores the previous one; the same for the thread's capture mode: while
// any thread captures a graph in the global mode, the default, a query of an event on another thread would fail and invalidate the
// graph. No call here touches a stream in capture (device_ops.stream_is_capturing).
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/status.h"
#include "device/device.h"

typedef int cu_result;                  // CUresult; 0: success
typedef int cu_device;                  // CUdevice; all others are pointers

enum {
    CU_NOT_READY = 600,
    CU_HOST_PORTABLE = 1, CU_HOST_MAPPED = 2,
    CU_STREAM_NON_BLOCKING = 1,
    CU_EVENT_DISABLE_TIMING = 2,
    CU_CAPTURE_NONE = 0,
    CU_CAPTURE_MODE_RELAXED = 2,
    DRIVER_OLDEST = 11040               // CUDA 11.4: cuStreamIsCapturing and all other functions used here; H100 soon after
};

// Exported symbol, member, prototype.
#define DRIVER_FUNCTIONS(X)                                                                                      \
    X("cuInit", init, (unsigned flags))                                                                          \
    X("cuDriverGetVersion", driver_get_version, (int *version))                                                  \
    X("cuDeviceGetCount", device_get_count, (int *count))                                                        \
    X("cuDeviceGet", device_get, (cu_device *device, int ordinal))                                               \
    X("cuDevicePrimaryCtxRetain", primary_retain, (void **context, cu_device device))                            \
    X("cuDevicePrimaryCtxRelease_v2", primary_release, (cu_device device))                                       \
    X("cuCtxPushCurrent_v2", context_push, (void *context))                                                      \
    X("cuCtxPopCurrent_v2", context_pop, (void **context))                                                       \
    X("cuThreadExchangeStreamCaptureMode", exchange_capture_mode, (int *mode))                                   \
    X("cuCtxGetStreamPriorityRange", priority_range, (int *least, int *greatest))                                \
    X("cuMemHostAlloc", host_allocate, (void **memory, size_t nbytes, unsigned flags))                           \
    X("cuMemFreeHost", host_free, (void *memory))                                                                \
    X("cuMemAlloc_v2", device_allocate, (void **memory, size_t nbytes))                                          \
    X("cuMemFree_v2", device_free, (void *memory))                                                               \
    X("cuDeviceGetUuid_v2", device_get_uuid, (uint8_t *uuid, cu_device device))                                  \
    X("cuMemcpyAsync", copy_async, (void *dst, const void *src, size_t nbytes, void *stream))                    \
    X("cuStreamCreateWithPriority", stream_create, (void **stream, unsigned flags, int priority))                \
    X("cuStreamDestroy_v2", stream_destroy, (void *stream))                                                      \
    X("cuStreamIsCapturing", stream_is_capturing, (void *stream, int *status))                                   \
    X("cuStreamWaitEvent", stream_wait_event, (void *stream, void *event, unsigned flags))                       \
    X("cuEventCreate", event_create, (void **event, unsigned flags))                                             \
    X("cuEventDestroy_v2", event_destroy, (void *event))                                                         \
    X("cuEventRecord", event_record, (void *event, void *stream))                                                \
    X("cuEventQuery", event_query, (void *event))                                                                \
    X("cuEventSynchronize", event_synchronize, (void *event))                                                    \
    X("cuLaunchKernel", launch_kernel,                                                                           \
      (void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,    \
       unsigned block_z, unsigned shared_nbytes, void *stream, void **params, void **extra))                     \
    X("cuGetErrorName", get_error_name, (cu_result code, const char **text))                                     \
    X("cuGetErrorString", get_error_string, (cu_result code, const char **text))

#define MEMBER(symbol, member, prototype) cu_result(*member) prototype;
struct driver {
    DRIVER_FUNCTIONS(MEMBER)
};

struct cuda {
    struct bhvd_device base;
    struct driver driver;
    cu_device device;
    void *context;
};

static bhvd_status driver_open(struct driver *driver, const char *libraries, int *version, struct bhvd_error *error)
{
#define SYMBOL(symbol, member, prototype) {symbol, (void **)&driver->member},
    const struct library_symbol symbols[] = {DRIVER_FUNCTIONS(SYMBOL)};
    bhvd_status status = library_open(
        "libcuda.so.1", libraries,
        "it comes with NVIDIA's driver; BAGUA_HVD_LIBCUDA sets its path", symbols,
        sizeof symbols / sizeof symbols[0], error);
    if (status)
        return status;
    *version = 0;
    if (driver->driver_get_version(version) || *version < DRIVER_OLDEST)
        return error_set(error, BHVD_ERR_UNSUPPORTED, "libcuda.so.1 supports CUDA %d.%d; bagua_hvd needs at least %d.%d: "
                         "install a newer driver", *version / 1000, *version % 1000 / 10, DRIVER_OLDEST / 1000,
                         DRIVER_OLDEST % 1000 / 10);
    cu_result code = driver->init(0);
    const char *name = NULL;
    if (code) {
        driver->get_error_name(code, &name);
        return error_set(error, BHVD_ERR_UNSUPPORTED, "NVIDIA's driver (CUDA %d.%d) does not start: %s", *version / 1000,
                         *version % 1000 / 10, name ? name : "unknown error");
    }
    return BHVD_OK;
}

bhvd_status bhvd_cuda_probe(const char *libraries, int *version, int *device_count, struct bhvd_error *error)
{
    struct driver driver;
    *version = *device_count = 0;
    bhvd_status status = driver_open(&driver, libraries, version, error);
    if (!status && driver.device_get_count(device_count))
        *device_count = 0;
    return status;
}

// ------------------------------------------------------------------------------------------------------- the device

static struct cuda *cuda_of(struct bhvd_device *device) { return (struct cuda *)device; }

// The value of a driver call, made with the device's context current.
#define IN_CONTEXT(device, call)                                                        \
    __extension__({                                                                     \
        const struct driver *const driver = &cuda_of(device)->driver;                   \
        void *popped;                                                                   \
        int mode = CU_CAPTURE_MODE_RELAXED;                                             \
        cu_result code = driver->context_push(cuda_of(device)->context);                \
        if (!code) {                                                                    \
            driver->exchange_capture_mode(&mode);                                       \
            code = driver->call;                                                        \
            driver->exchange_capture_mode(&mode);                                       \
            driver->context_pop(&popped);                                               \
        }                                                                               \
        code;                                                                           \
    })

static int cuda_memory_allocate(struct bhvd_device *device, enum device_memory memory, size_t nbytes, void **out)
{
    return memory == MEMORY_DEVICE ? IN_CONTEXT(device, device_allocate(out, nbytes))
                                   : IN_CONTEXT(device, host_allocate(out, nbytes, CU_HOST_PORTABLE | CU_HOST_MAPPED));
}

// At the end of the process the driver may have been unloaded, with all its memory: the result does not matter.
static void cuda_memory_free(struct bhvd_device *device, enum device_memory memory, void *data)
{
    (void)(memory == MEMORY_DEVICE ? IN_CONTEXT(device, device_free(data)) : IN_CONTEXT(device, host_free(data)));
}

static int cuda_enter(struct bhvd_device *device) { return cuda_of(device)->driver.context_push(cuda_of(device)->context); }

static void cuda_leave(struct bhvd_device *device)
{
    void *popped;
    cuda_of(device)->driver.context_pop(&popped);
}

static int cuda_stream_create(struct bhvd_device *device, void **out)
{
    int least = 0, greatest = 0;
    int code = IN_CONTEXT(device, priority_range(&least, &greatest));
    return code ?: IN_CONTEXT(device, stream_create(out, CU_STREAM_NON_BLOCKING, greatest));
}

static int cuda_stream_is_capturing(struct bhvd_device *device, void *stream, int *capturing)
{
    int status = CU_CAPTURE_NONE;
    int code = IN_CONTEXT(device, stream_is_capturing(stream, &status));
    *capturing = status != CU_CAPTURE_NONE;
    return code;
}

static int cuda_event_query(struct bhvd_device *device, void *event)
{
    int code = IN_CONTEXT(device, event_query(event));
    return code == CU_NOT_READY ? DEVICE_NOT_READY : code;
}

#define IN_ITS_CONTEXT(name, parameters, call) static int cuda_##name parameters { return IN_CONTEXT(device, call); }
IN_ITS_CONTEXT(stream_destroy, (struct bhvd_device *device, void *stream), stream_destroy(stream))
IN_ITS_CONTEXT(event_destroy, (struct bhvd_device *device, void *event), event_destroy(event))
IN_ITS_CONTEXT(event_create, (struct bhvd_device *device, void **out), event_create(out, CU_EVENT_DISABLE_TIMING))
IN_ITS_CONTEXT(event_record, (struct bhvd_device *device, void *event, void *stream), event_record(event, stream))
IN_ITS_CONTEXT(event_wait, (struct bhvd_device *device, void *event), event_synchronize(event))
IN_ITS_CONTEXT(stream_wait_event, (struct bhvd_device *device, void *stream, void *event), stream_wait_event(stream, event, 0))
IN_ITS_CONTEXT(copy, (struct bhvd_device *device, void *dst, const void *src, size_t nbytes, void *stream),
               copy_async(dst, src, nbytes, stream))
IN_ITS_CONTEXT(launch, (struct bhvd_device *device, void *kernel, unsigned blocks, unsigned threads, void **params, void *stream),
               launch_kernel(kernel, blocks, 1, 1, threads, 1, 1, 0, stream, params, NULL))

static void cuda_explain(struct bhvd_device *device, int code, char *out, size_t size)
{
    const struct driver *driver = &cuda_of(device)->driver;
    const char *name = NULL, *text = NULL;
    driver->get_error_name(code, &name);
    driver->get_error_string(code, &text);
    snprintf(out, size, "%s (%s)", text ? text : "unknown error", name ? name : "no name");
}

static void cuda_destroy(struct bhvd_device *device)
{
    struct cuda *cuda = cuda_of(device);
    if (cuda->context)
        cuda->driver.primary_release(cuda->device);
    free(cuda);
}

static const struct device_ops cuda_ops = {
    .memory_allocate = cuda_memory_allocate,
    .memory_free = cuda_memory_free,
    .enter = cuda_enter,
    .leave = cuda_leave,
    .stream_create = cuda_stream_create,
    .stream_destroy = cuda_stream_destroy,
    .stream_is_capturing = cuda_stream_is_capturing,
    .event_create = cuda_event_create,
    .event_destroy = cuda_event_destroy,
    .event_record = cuda_event_record,
    .event_query = cuda_event_query,
    .event_wait = cuda_event_wait,
    .stream_wait_event = cuda_stream_wait_event,
    .copy = cuda_copy,
    .launch = cuda_launch,
    .explain = cuda_explain,
    .destroy = cuda_destroy,
};

bhvd_status cuda_create(int index, const char *libraries, struct bhvd_device **out, struct bhvd_error *error)
{
    int version, count = 0;
    struct cuda *cuda = calloc(1, sizeof *cuda);
    if (!cuda)
        return error_set(error, BHVD_ERR_SYSTEM, "no memory for GPU %d", index);
    bhvd_status status = driver_open(&cuda->driver, libraries, &version, error);
    if (status) {
        free(cuda);
        return status;
    }
    cuda->base.ops = &cuda_ops;
    cuda->base.driver_version = version;
    cu_result code = cuda->driver.device_get_count(&count);
    if (!code && (index < 0 || index >= count)) {
        free(cuda);
        return error_set(error, BHVD_ERR_ARGUMENT, "there is no GPU %d: the driver (CUDA %d.%d) has %d", index,
                         version / 1000, version % 1000 / 10, count);
    }
    code = code ?: cuda->driver.device_get(&cuda->device, index);
    code = code ?: cuda->driver.device_get_uuid(cuda->base.uuid, cuda->device);
    code = code ?: cuda->driver.primary_retain(&cuda->context, cuda->device);
    code = code ?: device_init(&cuda->base, &cuda_ops, index);
    if (code) {
        cuda->base.index = index;
        status = device_failed(&cuda->base, code, "it cannot be opened", error);
        cuda_destroy(&cuda->base);
        return status;
    }
    *out = &cuda->base;
    return BHVD_OK;
}
