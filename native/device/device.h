// A GPU as the core sees it: memory that the host cannot touch, and streams that work by themselves, ordered by events.
//
//     devices.c   what all devices share: reference count, kernels, copies that the host waits for
//     launch.c    launches of kernels.cu
//     cuda.c      NVIDIA's driver, opened at run time
//     buffer.c    memory that is kept between operations
//     scratch.c   memory for what is put on a stream, and copies of many spans there
//     nccl.c      NVIDIA's collectives, opened at run time
//
// Nothing here blocks but what says so. Everything may be called from any thread.
#pragma once

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "bagua_hvd.h"

struct bhvd_device;

// All int results: 0, one of these, or the driver's own code, which `explain` puts into words.
enum { DEVICE_NOT_READY = -1, DEVICE_NO_MEMORY = -2 };

// PINNED: host memory that the device reads and writes without the host's help. DEVICE: its own, which the host cannot touch.
enum device_memory { MEMORY_PINNED, MEMORY_DEVICE };

enum {
    DEVICE_UUID_BYTES = 16,
    DEVICE_TYPES = 4                    // float32, float64, float16, bfloat16: device_type_of
};

// Streams and events are the driver's handles; a stream of the framework may be NULL, its default one.
struct device_ops {
    // Slow, and may wait for the device: to be kept and used again (buffer.h).
    int (*memory_allocate)(struct bhvd_device *device, enum device_memory memory, size_t nbytes, void **out);
    void (*memory_free)(struct bhvd_device *device, enum device_memory memory, void *data);
    // Around calls of libraries that look for the calling thread's current device: NCCL.
    int (*enter)(struct bhvd_device *device);
    void (*leave)(struct bhvd_device *device);
    // The most urgent of the GPU's streams. Does not wait for the framework's default stream, nor it for this one.
    int (*stream_create)(struct bhvd_device *device, void **out);
    void (*stream_destroy)(struct bhvd_device *device, void *stream);
    // 1: a CUDA graph is being captured from it, and nothing can be ordered after it. 0: not. Else an error.
    int (*stream_is_capturing)(struct bhvd_device *device, void *stream, int *capturing);
    int (*event_create)(struct bhvd_device *device, void **out);
    void (*event_destroy)(struct bhvd_device *device, void *event);
    int (*event_record)(struct bhvd_device *device, void *event, void *stream);
    // 0: everything before the record has run. DEVICE_NOT_READY: not yet. Else what went wrong on the GPU.
    int (*event_query)(struct bhvd_device *device, void *event);
    int (*event_wait)(struct bhvd_device *device, void *event);         // blocks the host
    // What is put on the stream from now on runs after what the event recorded last.
    int (*stream_wait_event)(struct bhvd_device *device, void *stream, void *event);
    // Between device and host, any direction, in the order of the stream.
    int (*copy)(struct bhvd_device *device, void *dst, const void *src, size_t nbytes, void *stream);
    // params: the addresses of the arguments, 8 bytes each, read before it returns.
    int (*launch)(struct bhvd_device *device, void *kernel, unsigned blocks, unsigned threads, void **params,
                  void *stream);
    // Writes one clause about the code.
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
    uint8_t uuid[DEVICE_UUID_BYTES];            // of this GPU, different from every other's in the world
    int driver_version;                         // 12040 for CUDA 12.4
    struct nccl *nccl;                          // NULL: it is not to be used, or not there
    pthread_mutex_t lock;                       // of the list
    struct device_buffer *free_buffers;         // buffer.c
};

// What every device does last in its creation: streams, locks. On error nothing is left but ops->destroy's part.
int device_init(struct bhvd_device *device, const struct device_ops *ops, int index);
void device_hold(struct bhvd_device *device);

// error: "GPU 0: <what>: <why>"; returns BHVD_ERR_SYSTEM.
bhvd_status device_failed(struct bhvd_device *device, int code, const char *what, struct bhvd_error *error);
// An error while a graph is being captured from the stream: what the core does there would invalidate it. what: happened.
bhvd_status device_check_capture(struct bhvd_device *device, void *stream, const char *what, struct bhvd_error *error);

// Which of a kernel's four is the dtype's; -1: none.
int device_type_of(bhvd_dtype dtype);
void *device_kernel(const struct bhvd_device *device, bhvd_device_kernel kernel, int type);
int device_launch(struct bhvd_device *device, bhvd_device_kernel kernel, int type, uint64_t blocks, void **params, void *stream);
// Over all elements of a vector.
int device_launch_over(struct bhvd_device *device, bhvd_device_kernel kernel, int type, uint64_t count, void **params,
                       void *stream);

bhvd_status cuda_create(int index, const char *libraries, struct bhvd_device **out, struct bhvd_error *error);
