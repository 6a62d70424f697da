// The host's memory as a device: everything is done at once, in the order of the calls. What a device must do, in the
// fewest words, for tests of staging without a GPU. It has no kernels.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/status.h"
#include "device/device.h"

enum { NO_KERNELS = 1 };

static int cpu_allocate(struct bhvd_device *device, enum device_memory memory, size_t nbytes, void **out)
{
    (void)device, (void)memory;
    *out = aligned_alloc(256, (nbytes + 255) / 256 * 256);
    return *out ? 0 : DEVICE_NO_MEMORY;
}

static void cpu_free(struct bhvd_device *device, enum device_memory memory, void *data)
{
    (void)device, (void)memory;
    free(data);
}

static int cpu_enter(struct bhvd_device *device)
{
    (void)device;
    return 0;
}

static void cpu_leave(struct bhvd_device *device) { (void)device; }

// A stream, or an event, is anything that is not NULL.
static int cpu_create(struct bhvd_device *device, void **out)
{
    *out = device;
    return 0;
}

static void cpu_destroy_handle(struct bhvd_device *device, void *handle) { (void)device, (void)handle; }

static int cpu_is_capturing(struct bhvd_device *device, void *stream, int *capturing)
{
    (void)device, (void)stream;
    *capturing = 0;
    return 0;
}

static int cpu_order(struct bhvd_device *device, void *a, void *b)
{
    (void)device, (void)a, (void)b;
    return 0;
}

static int cpu_done(struct bhvd_device *device, void *event)
{
    (void)device, (void)event;
    return 0;
}

static int cpu_copy(struct bhvd_device *device, void *dst, const void *src, size_t nbytes, void *stream)
{
    (void)device, (void)stream;
    memcpy(dst, src, nbytes);
    return 0;
}

static int cpu_launch(struct bhvd_device *device, void *kernel, unsigned blocks, unsigned threads, void **params,
                      void *stream)
{
    (void)device, (void)kernel, (void)blocks, (void)threads, (void)params, (void)stream;
    return NO_KERNELS;
}

static void cpu_explain(struct bhvd_device *device, int code, char *out, size_t size)
{
    (void)device, (void)code;
    snprintf(out, size, "the CPU as a device has no kernels");
}

static void cpu_destroy(struct bhvd_device *device) { free(device); }

static const struct device_ops cpu_ops = {
    .memory_allocate = cpu_allocate,
    .memory_free = cpu_free,
    .enter = cpu_enter,
    .leave = cpu_leave,
    .stream_create = cpu_create,
    .stream_destroy = cpu_destroy_handle,
    .stream_is_capturing = cpu_is_capturing,
    .event_create = cpu_create,
    .event_destroy = cpu_destroy_handle,
    .event_record = cpu_order,
    .event_query = cpu_done,
    .event_wait = cpu_done,
    .stream_wait_event = cpu_order,
    .copy = cpu_copy,
    .launch = cpu_launch,
    .explain = cpu_explain,
    .destroy = cpu_destroy,
};

bhvd_status cpu_device_create(int index, struct bhvd_device **out, struct bhvd_error *error)
{
    struct bhvd_device *device = calloc(1, sizeof *device);
    if (!device)
        return error_set(error, BHVD_ERR_SYSTEM, "no memory for a device");
    device_init(device, &cpu_ops, index);
    *out = device;
    return BHVD_OK;
}
