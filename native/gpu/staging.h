// Operations on tensors of a device, through pinned memory, so that everything above sees the host's memory:
//
//     posted      an event of the framework's stream; stream to_host waits for it, copies the tensors out, records `ready`;
//                 small ones are packed on the device and cross the link by one copy
//     announced   when the engine sees `ready`; until then it lies in ctx->staged (core/execution/engine.c)
//     executed    as any operation, in pinned memory
//     ended       stream from_host copies the results back, in the same way, and records `done`
//     waited for  the framework's stream waits for `done`; the host does not
//
// Results that the core allocates (allgather, alltoall) stay in the host's memory; those that have a dst on the device go there.
//
// An operation that NCCL takes (gpu/nccl.h) is not staged: it is posted `direct`, announced at once, or in two
// levels when the tensors may be read, and NCCL reads and writes them where they are. While a process set has not agreed on NCCL,
// operations are staged.
#pragma once

#include "device/device.h"
#include "run/work.h"

struct staged_codes;

// Where a tensor was posted: on the device, but for dst where dst_on_host says so.
struct staging_place {
    const void *src;
    void *dst;                          // NULL: the core allocates
    bool dst_on_host;
    struct device_buffer *result;       // what it has allocated on the device
};

struct staging {
    struct bhvd_device *device;
    struct device_buffer *buffer;       // pinned; `ready`: the tensors may be read, `done`: the results are there
    bool direct, by_nccl;               // how it was posted; how it was executed
    struct staged_codes *codes;         // encoded on the device (gpu/staged_codes.h); NULL: not
    bool host_waits;                    // direct, but the execution waits for the tensors: announced when they are there
    size_t small_count, small_nbytes;   // tensors that are packed on the device where it has the kernel, first in the buffer
    size_t count;
    struct staging_place places[];
};

// Puts work->tensors into pinned memory and starts the copies; direct: only marks where the framework's stream is.
// set_size: of the operation's process set; rank: this one's. On error nothing is left, and the tensors are as they were.
bhvd_status staging_create(struct work *work, const struct bhvd_args *args, int set_size, int rank, bool direct,
                           struct bhvd_error *error);
// The part of it that copies nothing: work->staging with a pinned buffer of nbytes, at *out.
bhvd_status staging_open(struct work *work, const struct bhvd_args *args, size_t nbytes, unsigned char **out,
                         struct bhvd_error *error);
// 1: the tensors are in the host's memory, or need not be. 0: not yet. -1: the GPU failed, *error says how.
int staging_is_ready(const struct staging *staging, struct bhvd_error *error);
// Starts the copies back, of an operation that ended well.
bhvd_status staging_end(struct work *work, struct bhvd_error *error);
// The stream goes on when the results are there.
bhvd_status staging_join(const struct staging *staging, void *stream, struct bhvd_error *error);
// Copies what was allocated on the device for a tensor. BHVD_ERR_ARGUMENT: nothing was.
bhvd_status staging_copy_result(const struct work *work, size_t index, void *dst, void *stream, struct bhvd_error *error);
// The buffer goes back to the device, which uses it again when the GPU is done with it. destroy(NULL) is fine.
void staging_destroy(struct staging *staging);
