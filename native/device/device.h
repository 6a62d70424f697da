// A GPU for the core: memory that the host cannot access, and asynchronous streams, ordered by events.
//
//     devices.c   common to all devices: reference count, copies that the host waits for, launches of kernels.cu; NCCL, opened at
//                 run time
//     cuda.c      NVIDIA's driver, opened at run time
//     buffer.c    memory of operations, and copies of many spans on the device
//
// Nothing here blocks unless documented. All functions may be called from any thread.
#pragma once

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "bagua_hvd.h"

struct bhvd_device;

// All int results: 0, one of these, or the driver's own code, which `explain` turns into text.
enum { DEVICE_NOT_READY = -1, DEVICE_NO_MEMORY = -2 };

// PINNED: host memory that the device accesses directly. DEVICE: its own memory, which the host cannot access.
enum device_memory { MEMORY_PINNED, MEMORY_DEVICE };

enum {
    DEVICE_UUID_BYTES = 16,
    DEVICE_THREADS = 256,               // per block of a kernel
    DEVICE_TYPES = 4                    // float32, float64, float16, bfloat16: device_type_of
};

// Streams and events are the driver's handles; a stream of the framework may be NULL, its default one.
struct device_ops {
    // Slow, and may wait for the device: cache the memory (buffer.h).
    int (*memory_allocate)(struct bhvd_device *device, enum device_memory memory, size_t nbytes, void **out);
    void (*memory_free)(struct bhvd_device *device, enum device_memory memory, void *data);
    // Around calls of libraries that use the calling thread's current device: NCCL.
    int (*enter)(struct bhvd_device *device);
    void (*leave)(struct bhvd_device *device);
    // A stream with the GPU's highest priority. Does not synchronize with the framework's default stream.
    int (*stream_create)(struct bhvd_device *device, void **out);
    int (*stream_destroy)(struct bhvd_device *device, void *stream);
    // 1: a CUDA graph is being captured from it, and nothing can be ordered after it. 0: no capture. Else an error.
    int (*stream_is_capturing)(struct bhvd_device *device, void *stream, int *capturing);
    int (*event_create)(struct bhvd_device *device, void **out);
    int (*event_destroy)(struct bhvd_device *device, void *event);
    int (*event_record)(struct bhvd_device *device, void *event, void *stream);
    // 0: everything before the record has run. DEVICE_NOT_READY: not yet. Else the error on the GPU.
    int (*event_query)(struct bhvd_device *device, void *event);
    int (*event_wait)(struct bhvd_device *device, void *event);         // blocks the host
    // Work that is put on the stream from now on runs after the work that the event recorded last.
    int (*stream_wait_event)(struct bhvd_device *device, void *stream, void *event);
    // Copies between device and host, in any direction, in stream order.
    int (*copy)(struct bhvd_device *device, void *dst, const void *src, size_t nbytes, void *stream);
    // params: the addresses of the arguments, 8 bytes each, read before it returns.
    int (*launch)(struct bhvd_device *device, void *kernel, unsigned blocks, unsigned threads, void **params,
                  void *stream);
    // Writes a phrase that explains the code.
    void (*explain)(struct bhvd_device *device, int code, char *out, size_t size);
    void (*destroy)(struct bhvd_device *device);        // frees the whole object
};

struct device_buffer;
struct nccl;

struct bhvd_device {
    const struct device_ops *ops;
    atomic_int references;
    int index;
    void *to_host, *from_host;                  // streams
    _Atomic(void *) kernels[BHVD_DEVICE_KERNEL_COUNT][DEVICE_TYPES];
    uint8_t uuid[DEVICE_UUID_BYTES];            // of this GPU, globally unique
    int driver_version;                         // 12040 for CUDA 12.4
    struct nccl *nccl;                          // NULL: disabled, or not found
    pthread_mutex_t lock;                       // of free_buffers
    struct device_buffer *free_buffers;         // buffer.c
};

// Common last part of a device's creation: streams, locks. On error nothing is left but ops->destroy's part.
int device_init(struct bhvd_device *device, const struct device_ops *ops, int index);
void device_hold(struct bhvd_device *device);

// error: "GPU 0: <what>: <why>"; returns BHVD_ERR_SYSTEM.
bhvd_status device_failed(struct bhvd_device *device, int code, const char *what, struct bhvd_error *error);
// An error if a graph is being captured from the stream, which the core's work there would invalidate. what: for the message.
bhvd_status device_check_capture(struct bhvd_device *device, void *stream, const char *what, struct bhvd_error *error);

// Index of the dtype among a kernel's four variants; -1: none.
int device_type_of(bhvd_dtype dtype);
void *device_kernel(const struct bhvd_device *device, bhvd_device_kernel kernel, int type);
int device_launch(struct bhvd_device *device, bhvd_device_kernel kernel, int type, uint64_t blocks, void **params, void *stream);
// Launches the kernel over all elements of a vector.
int device_launch_over(struct bhvd_device *device, bhvd_device_kernel kernel, int type, uint64_t count, void **params,
                       void *stream);

bhvd_status cuda_create(int index, const char *libraries, struct bhvd_device **out, struct bhvd_error *error);

// A function of a library of the GPU's vendor, which is opened at run time: not needed to build or to import.
struct library_symbol {
    const char *name;                   // as exported
    void **address;                     // of the variable for its address
};

// Opens the first file of `paths` that loads (separated by ':'; NULL: none), else `soname`: the copy that the process has already
// loaded, or one that the system finds. Then resolves the symbols. The library stays loaded, because GPU libraries cannot be
// unloaded safely. BHVD_ERR_UNSUPPORTED: the message names the missing library or function, and `remedy`.
bhvd_status library_open(const char *soname, const char *paths, const char *remedy,
                         const struct library_symbol *symbols, size_t count, struct bhvd_error *error);
