// What the collectives by NCCL share: an execution that only enqueues work, and its helpers. See nccl.h.
#ifndef BHVD_COLLECTIVE_NCCL_RUN_H
#define BHVD_COLLECTIVE_NCCL_RUN_H

#include "collective/hierarchy.h"
#include "collective/nccl.h"
#include "device/buffer.h"
#include "device/nccl.h"
#include "device/staging.h"

struct nccl_run {
    bhvd_context *ctx;
    struct process_set *set;            // the communicator's members
    const struct hierarchy *levels;     // in two levels: of the set that the operation is on; else NULL
    struct nccl_group *group;
    struct bhvd_device *device;
    const struct nccl *nccl;
    const struct execution *execution;
    void *stream;
    struct device_buffer *tables;       // pinned: tables of spans, one after the other; its `done` ends the execution
    size_t spans_used;
    struct device_buffer *scratch;      // in use, linked by `next`
    bool host_waits;
};

// The driver's code, as a failure of the context.
bhvd_status nccl_run_checked(struct nccl_run *x, int code);
// The result of a call outside a group.
bhvd_status nccl_run_enqueued(struct nccl_run *x, nccl_result result);
// Inside a group the first result that is none of the good ones stays; `inside` of the end is that.
void nccl_run_keep(nccl_result *inside, nccl_result result);
bhvd_status nccl_run_group_end(struct nccl_run *x, nccl_result inside);

// Memory until the execution's work on the stream is done.
bhvd_status nccl_run_scratch(struct nccl_run *x, enum device_memory memory, size_t nbytes, struct device_buffer **out);
// Between any two of host and device, in the order of the stream.
bhvd_status nccl_run_copy(struct nccl_run *x, void *dst, const void *src, size_t nbytes);

enum nccl_type nccl_run_type(bhvd_dtype dtype);
enum nccl_op nccl_run_op(bhvd_op op);

// ------------------------------------------------------------------------------------------- in two levels (nccl_levels.c)

// Bytes that the device's memory needs for a vector of nbytes.
size_t nccl_levels_room(const struct hierarchy *h, size_t nbytes);
// In place, all but the prescaling; vector: on the device, with that much room.
bhvd_status nccl_levels_allreduce(struct nccl_run *x, bhvd_op op, const struct reduction *reduction, unsigned char *vector,
                                  size_t nbytes);
// src: the root's; dst: on the device. root: position in the operation's set.
bhvd_status nccl_levels_broadcast(struct nccl_run *x, int root, const void *src, unsigned char *dst, size_t nbytes);
// The hosts hold equally many members. part: by position in the operation's set; dst: on the device, all parts.
bhvd_status nccl_levels_allgather(struct nccl_run *x, const void *src, unsigned char *dst, const size_t *part);

#endif
