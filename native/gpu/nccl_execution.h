// An execution by NCCL, which only enqueues work, and helpers for its collectives. See nccl.h.
#pragma once

#include "collective/collectives.h"
#include "device/nccl_library.h"
#include "device/scratch.h"
#include "executor/group.h"
#include "gpu/nccl.h"
#include "gpu/staging.h"

enum { NCCL_ALIGNMENT = 256 };          // of tensors and shards in a buffer, for vectors in NCCL's kernels

struct nccl_execution {
    struct executor *exec;
    struct group *set;                  // the communicator's members; hierarchical: those of this host
    const struct hierarchy *hierarchy;  // of the operation's set if hierarchical; else NULL
    struct nccl_comm *comm;
    struct bhvd_device *device;
    const struct nccl *nccl;
    struct collective *const *colls;
    int count;                          // of collectives
    void *stream;
    struct device_scratch scratch;      // in use until the execution's work on the stream is done
    bool host_waits;
};

// Turns the driver's error into a failure of the executor.
bhvd_status nccl_execution_checked(struct nccl_execution *x, int failed);
// For the result of a call outside a group.
bhvd_status nccl_execution_enqueued(struct nccl_execution *x, nccl_result result);
// Inside a group: keeps the first error, which is passed to the end as `inside`.
void nccl_execution_keep(nccl_result *inside, nccl_result result);
bhvd_status nccl_execution_group_end(struct nccl_execution *x, nccl_result inside);

// Waits until the event has passed.
bhvd_status nccl_execution_wait(struct nccl_execution *x, void *event);
// Copies between host and device, in any direction, in stream order.
bhvd_status nccl_execution_copy(struct nccl_execution *x, void *dst, const void *src, size_t nbytes);

enum nccl_type nccl_execution_type(bhvd_dtype dtype);
enum nccl_op nccl_execution_op(bhvd_op op);

// Parts of a vector, one after the other, for the first `count` ranks: of[rank] bytes, or `each` if that is NULL.
struct nccl_parts {
    const size_t *of;
    size_t each;
    int count;
};

// Reduces all src, and writes each rank's part to its dst.
bhvd_status nccl_execution_reduce_scatter(struct nccl_execution *x, bhvd_op op, bhvd_dtype dtype, const unsigned char *src,
                                          void *dst, const struct nccl_parts *parts);
// Gathers each rank's part, src, into every dst. src may be this rank's part of dst.
bhvd_status nccl_execution_all_gather(struct nccl_execution *x, const void *src, unsigned char *dst,
                                      const struct nccl_parts *parts);
