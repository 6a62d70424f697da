// Host memory as a device: every call completes immediately. It has no kernels.
#pragma once

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "device/device.h"

enum { NO_KERNELS = 1 };

static int host_allocate(struct bhvd_device *device, enum device_memory memory, size_t nbytes, void **out)
{
    (void)device, (void)memory;
    *out = aligned_alloc(256, (nbytes + 255) / 256 * 256);
    return *out ? 0 : DEVICE_NO_MEMORY;
}

static void host_free(struct bhvd_device *device, enum device_memory memory, void *data)
{
    (void)device, (void)memory;
    free(data);
}

static int host_enter(struct bhvd_device *device)
{
    (void)device;
    return 0;
}

static void host_leave(struct bhvd_device *device) { (void)device; }

// A stream or an event is any pointer that is not NULL.
static int host_create(struct bhvd_device *device, void **out)
{
    *out = device;
    return 0;
}

static int host_is_capturing(struct bhvd_device *device, void *stream, int *capturing)
{
    (void)device, (void)stream;
    *capturing = 0;
    return 0;
}

static int host_order(struct bhvd_device *device, void *a, void *b)
{
    (void)device, (void)a, (void)b;
    return 0;
}

static int host_done(struct bhvd_device *device, void *event)
{
    (void)device, (void)event;
    return 0;
}

static int host_copy(struct bhvd_device *device, void *dst, const void *src, size_t nbytes, void *stream)
{
    (void)device, (void)stream;
    memcpy(dst, src, nbytes);
    return 0;
}

static int host_launch(struct bhvd_device *device, void *kernel, unsigned blocks, unsigned threads, void **params,
                      void *stream)
{
    (void)device, (void)kernel, (void)blocks, (void)threads, (void)params, (void)stream;
    return NO_KERNELS;
}

static void host_explain(struct bhvd_device *device, int code, char *out, size_t size)
{
    (void)device, (void)code;
    snprintf(out, size, "the host's memory as a device has no kernels");
}

static void host_destroy(struct bhvd_device *device) { free(device); }

static const struct device_ops host_ops = {
    .memory_allocate = host_allocate,
    .memory_free = host_free,
    .enter = host_enter,
    .leave = host_leave,
    .stream_create = host_create,
    .stream_destroy = host_done,
    .stream_is_capturing = host_is_capturing,
    .event_create = host_create,
    .event_destroy = host_done,
    .event_record = host_order,
    .event_query = host_done,
    .event_wait = host_done,
    .stream_wait_event = host_order,
    .copy = host_copy,
    .launch = host_launch,
    .explain = host_explain,
    .destroy = host_destroy,
};

static struct bhvd_device *host_device_create(void)
{
    struct bhvd_device *device = calloc(1, sizeof *device);
    if (!device || device_init(device, &host_ops, 0))
        abort();
    return device;
}
