// An execution by NCCL, which only enqueues work, and helpers for its collectives. See nccl.h.
#pragma once

#include "collective/collectives.h"
#include "device/nccl_library.h"
#include "device/buffer.h"
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
// inside: the first error in the group.
bhvd_status nccl_execution_group_end(struct nccl_execution *x, nccl_result inside);
// Inside a group: sends to a member and receives from it; 0 bytes: not in that direction.
void nccl_execution_exchange(struct nccl_execution *x, nccl_result *inside, int peer, const void *out, size_t out_nbytes, void *in,
                             size_t in_nbytes);

// Waits until the event has passed.
bhvd_status nccl_execution_wait(struct nccl_execution *x, void *event);
// Copies between host and device, in any direction, in stream order.
bhvd_status nccl_execution_copy(struct nccl_execution *x, void *dst, const void *src, size_t nbytes);

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

// ------------------------------------------------------------------------------------------------------- hierarchical

// Hierarchical allreduce and broadcast, for process sets on several hosts: NCCL among the members of a host, and the CPU transports
// between hosts, through pinned memory. Other collectives of such sets are staged through the host (decision 30).
//
// Positions are in the set that x->hierarchy belongs to; x->set has only the members of this host. There is no circular wait: a
// member waits only for work that the others put on their streams before they wait.
//
// Bytes of device memory needed for a vector of nbytes.
size_t nccl_hierarchical_nbytes(const struct hierarchy *h, size_t nbytes);
// In place, without the prescaling; vector: on the device, with nccl_hierarchical_nbytes bytes.
bhvd_status nccl_hierarchical_allreduce(struct nccl_execution *x, bhvd_op op, const struct reduction *reduction,
                                        unsigned char *vector, size_t nbytes);
// src: at the root; dst: on the device. root: a position.
bhvd_status nccl_hierarchical_broadcast(struct nccl_execution *x, int root, const void *src, unsigned char *dst, size_t nbytes);
