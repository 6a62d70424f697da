#include "device/device.h"

enum { LAUNCH_FROM = 4 };               // spans: so many copies cost more than a launch

int device_copy_spans(struct bhvd_device *device, struct device_span *table, size_t count, void *stream)
{
    uint64_t pieces = 0;
    for (size_t i = 0; i < count; i++) {
        table[i].first_piece = pieces;
        pieces += (table[i].nbytes + SPANS_PIECE - 1) / SPANS_PIECE;
    }
    void *kernel = atomic_load(&device->kernels[BHVD_DEVICE_COPY_SPANS]);
    if (kernel && count >= LAUNCH_FROM && pieces <= INT32_MAX) {
        uint64_t spans = count;
        void *params[] = {&table, &spans};
        return device->ops->launch(device, kernel, (unsigned)pieces, SPANS_THREADS, params, stream);
    }
    int code = 0;
    for (size_t i = 0; i < count && !code; i++)
        code = device->ops->copy(device, table[i].dst, table[i].src, table[i].nbytes, stream);
    return code;
}
