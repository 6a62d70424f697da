#include "device/device.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/dtype.h"
#include "base/status.h"
#include "device/buffer.h"
#include "device/nccl_library.h"

enum { BLOCKS_MAX = 4096 };             // for launches over all elements: several times what any GPU runs at once

int device_init(struct bhvd_device *device, const struct device_ops *ops, int index)
{
    device->ops = ops;
    device->index = index;
    atomic_init(&device->references, 1);
    pthread_mutex_init(&device->lock, NULL);
    int code = ops->stream_create(device, &device->to_host);
    return code ?: ops->stream_create(device, &device->from_host);
}

void device_hold(struct bhvd_device *device) { atomic_fetch_add(&device->references, 1); }

void bhvd_device_drop(bhvd_device *device)
{
    if (!device || atomic_fetch_sub(&device->references, 1) != 1)
        return;
    device_buffers_free(device);
    free(device->nccl);
    if (device->to_host)
        device->ops->stream_destroy(device, device->to_host);
    if (device->from_host)
        device->ops->stream_destroy(device, device->from_host);
    pthread_mutex_destroy(&device->lock);
    device->ops->destroy(device);
}

bhvd_status bhvd_device_create(const struct bhvd_device_options *options, bhvd_device **out, struct bhvd_error *error)
{
    *out = NULL;
    bhvd_status status = cuda_create(options->index, options->libraries, out, error);
    if (status || !options->nccl_libraries)
        return status;
    // Without NCCL everything is staged through the host; bhvd_nccl_probe reports the reason.
    struct nccl *nccl = malloc(sizeof *nccl);
    struct bhvd_error unused;
    if (nccl && nccl_open(options->nccl_libraries, nccl, &unused)) {
        free(nccl);
        nccl = NULL;
    }
    (*out)->nccl = nccl;
    return BHVD_OK;
}

bhvd_status device_failed(struct bhvd_device *device, int code, const char *what, struct bhvd_error *error)
{
    char why[256] = "no memory on the host";
    if (code != DEVICE_NO_MEMORY)
        device->ops->explain(device, code, why, sizeof why);
    return error_set(error, BHVD_ERR_SYSTEM, "GPU %d: %s: %s", device->index, what, why);
}

bhvd_status device_check_capture(struct bhvd_device *device, void *stream, const char *what, struct bhvd_error *error)
{
    int capturing = 0;
    int code = device->ops->stream_is_capturing(device, stream, &capturing);
    if (code)
        return device_failed(device, code, "the framework's stream cannot be used", error);
    if (capturing)
        return error_set(error, BHVD_ERR_UNSUPPORTED, "%s while a CUDA graph is being captured: communication on the host "
                         "cannot be part of a graph, so end the capture before it", what);
    return BHVD_OK;
}

bhvd_status bhvd_device_set_kernel(bhvd_device *device, bhvd_device_kernel kernel, int type, void *function)
{
    if (kernel < 0 || kernel >= BHVD_DEVICE_KERNEL_COUNT || type < 0 || type >= DEVICE_TYPES)
        return BHVD_ERR_ARGUMENT;
    atomic_store(&device->kernels[kernel][type], function);
    return BHVD_OK;
}

void *bhvd_device_stream(bhvd_device *device, int to_host) { return to_host ? device->to_host : device->from_host; }

static size_t nbytes_of(const struct bhvd_tensor *tensor) { return tensor_elements(tensor, 0) * bhvd_dtype_size(tensor->dtype); }

bhvd_status bhvd_device_copy(bhvd_device *device, const struct bhvd_tensor *tensors, size_t count, void *stream,
                             struct bhvd_error *error)
{
    const struct device_ops *ops = device->ops;
    void *event = NULL;
    bhvd_status status = device_check_capture(device, stream, "a tensor was copied to the host", error);
    if (status)
        return status;
    int code = ops->event_create(device, &event);
    code = code ?: ops->event_record(device, event, stream);
    code = code ?: ops->stream_wait_event(device, device->to_host, event);
    for (size_t t = 0; t < count && !code; t++) {
        const size_t nbytes = nbytes_of(&tensors[t]);
        if (nbytes)
            code = ops->copy(device, tensors[t].dst, tensors[t].src, nbytes, device->to_host);
    }
    code = code ?: ops->event_record(device, event, device->to_host);
    code = code ?: ops->event_wait(device, event);
    if (event)
        ops->event_destroy(device, event);
    if (code)
        return device_failed(device, code, "copying between the GPU and the host failed", error);
    error_clear(error);
    return BHVD_OK;
}

int device_type_of(bhvd_dtype dtype)
{
    return dtype == BHVD_FLOAT32    ? 0
           : dtype == BHVD_FLOAT64  ? 1
           : dtype == BHVD_FLOAT16  ? 2
           : dtype == BHVD_BFLOAT16 ? 3
                                    : -1;
}

void *device_kernel(const struct bhvd_device *device, bhvd_device_kernel kernel, int type)
{
    return atomic_load(&device->kernels[kernel][type]);
}

int device_launch(struct bhvd_device *device, bhvd_device_kernel kernel, int type, uint64_t blocks, void **params, void *stream)
{
    return device->ops->launch(device, device_kernel(device, kernel, type), (unsigned)blocks, DEVICE_THREADS, params, stream);
}

int device_launch_over(struct bhvd_device *device, bhvd_device_kernel kernel, int type, uint64_t count, void **params,
                       void *stream)
{
    const uint64_t blocks = (count + 4 * DEVICE_THREADS - 1) / (4 * DEVICE_THREADS);
    return device_launch(device, kernel, type, blocks < BLOCKS_MAX ? blocks : BLOCKS_MAX, params, stream);
}

// --------------------------------------------------------------------------------------------------------- libraries

enum { PATH_SIZE = 4096, REASON_SIZE = 400 };

// reason: dlopen's message for the last of the paths, or, without paths, for the soname.
static void *open_first(const char *soname, const char *paths, char *reason)
{
    void *library = NULL;
    reason[0] = 0;
    for (const char *at = paths ? paths : ""; !library && *at;) {
        char path[PATH_SIZE];
        const size_t length = strcspn(at, ":");
        if (length > 0 && length < sizeof path) {
            memcpy(path, at, length);
            path[length] = 0;
            library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
            if (!library)
                snprintf(reason, REASON_SIZE, "%s", dlerror());
        }
        at += length + (at[length] == ':');
    }
    if (!library) {
        library = dlopen(soname, RTLD_NOW | RTLD_LOCAL);    // the process's own copy if it has loaded one already
        if (!library && !reason[0])
            snprintf(reason, REASON_SIZE, "%s", dlerror());
    }
    return library;
}

bhvd_status library_open(const char *soname, const char *paths, const char *remedy,
                         const struct library_symbol *symbols, size_t count, struct bhvd_error *error)
{
    char reason[REASON_SIZE];
    void *library = open_first(soname, paths, reason);
    if (!library)
        return error_set(error, BHVD_ERR_UNSUPPORTED, "%s cannot be loaded: %s; %s", soname, reason, remedy);
    for (size_t i = 0; i < count; i++) {
        *symbols[i].address = dlsym(library, symbols[i].name);
        if (!*symbols[i].address)
            return error_set(error, BHVD_ERR_UNSUPPORTED, "%s has no function %s: it is too old; %s", soname,
                             symbols[i].name, remedy);
    }
    return BHVD_OK;
}

enum { NCCL_OLDEST = 21400 };           // nonblocking communicators, which can be queried for errors

#define REMEDY "install the package nvidia-nccl-cu12 (or -cu13), or name the file in BAGUA_HVD_LIBNCCL"

bhvd_status nccl_open(const char *libraries, struct nccl *out, struct bhvd_error *error)
{
#define SYMBOL(symbol, member, result, prototype) {symbol, (void **)&out->member},
    const struct library_symbol symbols[] = {NCCL_FUNCTIONS(SYMBOL)};
    out->version = 0;
    // The version is checked first: a library that is too old also lacks functions, but the version makes a clearer message.
    bhvd_status status = library_open("libnccl.so.2", libraries, REMEDY, symbols, 1, error);
    if (status)
        return status;
    if (out->get_version(&out->version) || out->version < NCCL_OLDEST)
        return error_set(error, BHVD_ERR_UNSUPPORTED, "libnccl.so.2 has version %d; bagua_hvd needs %d at least: install "
                         "a newer nvidia-nccl-cu12 (or -cu13)", out->version, NCCL_OLDEST);
    return library_open("libnccl.so.2", libraries, REMEDY, symbols, sizeof symbols / sizeof symbols[0], error);
}

// Since 2.9, NCCL encodes versions as 10000 major + 100 minor + patch.
bhvd_status bhvd_nccl_probe(const char *libraries, int *version, struct bhvd_error *error)
{
    struct nccl nccl;
    bhvd_status status = nccl_open(libraries, &nccl, error);
    *version = nccl.version;
    if (!status)
        error_clear(error);
    return status;
}
