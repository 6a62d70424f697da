// What the collectives by NCCL share: an execution that only enqueues work, and its helpers. See nccl.h.
#pragma once

#include "collective/collective.h"
#include "device/nccl.h"
#include "device/scratch.h"
#include "gpu/nccl.h"
#include "gpu/staging.h"
#include "run/hierarchy.h"

enum { NCCL_ALIGNMENT = 256 };          // of tensors and shards in a buffer, for vectors in NCCL's kernels

struct nccl_run {
    struct run *run;
    struct group *set;                  // the communicator's members: in two levels those of this host
    const struct hierarchy *hierarchy;  // of the set that the operation is on, in two levels; else NULL
    struct nccl_group *group;
    struct bhvd_device *device;
    const struct nccl *nccl;
    struct work *const *works;
    int count;                          // of them
    void *stream;
    struct device_scratch scratch;      // until the execution's work on the stream is done
    bool host_waits;
};

// The driver's code, as a failure of the context.
bhvd_status nccl_run_checked(struct nccl_run *x, int code);
// The result of a call outside a group.
bhvd_status nccl_run_enqueued(struct nccl_run *x, nccl_result result);
// Inside a group the first result that is none of the good ones stays; `inside` of the end is that.
void nccl_run_keep(nccl_result *inside, nccl_result result);
bhvd_status nccl_run_group_end(struct nccl_run *x, nccl_result inside);

// Until the event has passed.
bhvd_status nccl_run_wait(struct nccl_run *x, void *event);
// Between any two of host and device, in the order of the stream.
bhvd_status nccl_run_copy(struct nccl_run *x, void *dst, const void *src, size_t nbytes);

enum nccl_type nccl_run_type(bhvd_dtype dtype);
enum nccl_op nccl_run_op(bhvd_op op);

// Parts of a vector, one after the other, of the first `count` ranks: of[rank] bytes, or `each` where that is NULL.
struct nccl_parts {
    const size_t *of;
    size_t each;
    int count;
};

// Of the sum of all src, each rank's part to its dst.
bhvd_status nccl_run_reduce_scatter(struct nccl_run *x, bhvd_op op, bhvd_dtype dtype, const unsigned char *src, void *dst,
                                    const struct nccl_parts *parts);
// All src, each a rank's part, to everybody's dst. src may lie where it goes.
bhvd_status nccl_run_all_gather(struct nccl_run *x, const void *src, unsigned char *dst, const struct nccl_parts *parts);
