// Hierarchical allreduce and broadcast, for process sets on several hosts: NCCL among the members of a host, and the CPU transports
// between hosts, through pinned memory. Other collectives of such sets are staged through the host (decision 30).
//
// Positions are in the set that x->hierarchy belongs to; x->set has only the members of this host. There is no circular wait: a
// member waits only for work that the others put on their streams before they wait.
#pragma once

#include "gpu/nccl_execution.h"

// Bytes of device memory needed for a vector of nbytes.
size_t nccl_hierarchical_nbytes(const struct hierarchy *h, size_t nbytes);
// In place, without the prescaling; vector: on the device, with nccl_hierarchical_nbytes bytes.
bhvd_status nccl_hierarchical_allreduce(struct nccl_execution *x, bhvd_op op, const struct reduction *reduction,
                                        unsigned char *vector, size_t nbytes);
// src: at the root; dst: on the device. root: a position.
bhvd_status nccl_hierarchical_broadcast(struct nccl_execution *x, int root, const void *src, unsigned char *dst, size_t nbytes);
