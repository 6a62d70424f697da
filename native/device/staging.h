// Operations on tensors of a device, through pinned memory, so that everything above sees the host's memory:
//
//     posted      an event of the framework's stream; stream to_host waits for it, copies the tensors out, records `ready`
//     announced   when the engine sees `ready`; until then it lies in ctx->staged (core/progress.c)
//     executed    as any operation, in pinned memory
//     ended       stream from_host copies the results back and records `done`
//     waited for  the framework's stream waits for `done`; the host does not
//
// Results that the core allocates (allgather, alltoall) stay in the host's memory.
#ifndef BHVD_STAGING_H
#define BHVD_STAGING_H

#include "core/operation.h"
#include "device/device.h"

// Puts op->tensors into pinned memory and starts the copies. set_size: of the operation's process set; rank: this one's.
// On error nothing is left, and the tensors are as they were.
bhvd_status staging_create(struct bhvd_handle *op, const struct bhvd_args *args, int set_size, int rank,
                           struct bhvd_error *error);
// 1: the tensors are in the host's memory. 0: not yet. -1: the GPU failed, *error says how.
int staging_is_ready(const struct staging *staging, struct bhvd_error *error);
// Starts the copies back, of an operation that ended well.
bhvd_status staging_end(struct bhvd_handle *op, struct bhvd_error *error);
// The buffer goes back to the device, which uses it again when the GPU is done with it. destroy(NULL) is fine.
void staging_destroy(struct staging *staging);

// When the device is destroyed: waits for what is under way.
void staging_free_buffers(struct bhvd_device *device);

#endif
