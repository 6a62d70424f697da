#include "device/device.h"

enum {
    THREADS = 256,                      // per block
    BLOCKS_MAX = 4096                   // for launches over all elements: several times what any GPU runs at once
};

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
    return device->ops->launch(device, device_kernel(device, kernel, type), (unsigned)blocks, THREADS, params, stream);
}

int device_launch_over(struct bhvd_device *device, bhvd_device_kernel kernel, int type, uint64_t count, void **params,
                       void *stream)
{
    const uint64_t blocks = (count + 4 * THREADS - 1) / (4 * THREADS);
    return device_launch(device, kernel, type, blocks < BLOCKS_MAX ? blocks : BLOCKS_MAX, params, stream);
}
