// Operations on GPU tensors, through pinned memory, so that the layers above see only host memory:
//
//     posted      an event of the framework's stream; stream to_host waits for it, copies the tensors out, records `ready`;
//                 small ones are packed on the device and cross the link in one copy
//     requested   after the engine sees `ready`; until then it is in ctx->staged (core/engine/engine.c)
//     executed    as any operation, in pinned memory
//     ended       stream from_host copies the results back in the same way, and records `done`
//     waited for  the framework's stream waits for `done`; the host does not
//
// Results that the core allocates (allgather, alltoall) stay in the host's memory; those with a dst on the device are copied there.
//
// An operation for NCCL (gpu/nccl.h) is not staged: it is posted `direct` and requested at once, or (hierarchical) when the tensors
// may be read, and NCCL reads and writes them in place. Until a process set has agreed on NCCL, its operations are staged.
#pragma once

#include "device/device.h"
#include "executor/collective.h"

struct staged_codes;

// The memory of a posted tensor: on the device, except dst if dst_on_host.
struct staged_tensor {
    const void *src;
    void *dst;                          // NULL: the core allocates
    bool dst_on_host;
    struct device_buffer *result;       // memory that it has allocated on the device
};

struct staging {
    struct bhvd_device *device;
    struct device_buffer *buffer;       // pinned; `ready`: the tensors may be read, `done`: the results are complete
    bool direct, by_nccl;               // whether posted without staging; whether executed by NCCL
    struct staged_codes *codes;         // encoded on the device (gpu/staged_codes.h); NULL: not encoded there
    bool host_waits;                    // direct, but the execution waits for the tensors: requested when they are ready
    size_t small_count, small_nbytes;   // tensors that are packed on the device if it has the kernel; first in the buffer
    struct staged_tensor tensors[];     // of the collective
};

// When it is posted: copies the caller's tensors to pinned memory, asynchronously; direct: only records an event on the framework's
// stream. set_size: of the operation's process set; rank: this one's. On error the caller's tensors are unchanged; what is left at
// coll->staging is freed with the operation.
bhvd_status staging_create(struct collective *coll, int set_size, int rank, bool direct, struct bhvd_error *error);
// The part of it without copies: coll->staging with a pinned buffer of nbytes, at *out.
bhvd_status staging_open(struct collective *coll, size_t nbytes, unsigned char **out, struct bhvd_error *error);
// 1: the tensors are in the host's memory, or need not be. 0: not yet. -1: the GPU failed; *error has the reason.
int staging_is_ready(const struct staging *staging, struct bhvd_error *error);
// Starts to copy results back, for an operation that succeeded.
bhvd_status staging_end(struct collective *coll, struct bhvd_error *error);
// Makes the stream wait for the results.
bhvd_status staging_join(const struct staging *staging, void *stream, struct bhvd_error *error);
// Copies the result that was allocated on the device for a tensor. BHVD_ERR_ARGUMENT: there is none.
bhvd_status staging_copy_result(const struct collective *coll, size_t index, void *dst, void *stream, struct bhvd_error *error);
// Returns the buffer to the device, which reuses it when the GPU has finished with it. Without staging it does nothing.
void staging_destroy(struct collective *coll);
