// Allreduce and broadcast in two levels, for process sets on several hosts: NCCL among the members of a host, and between the
// hosts the CPU transports, through pinned memory. Other collectives of such sets go by way of the host (decision 30).
//
// Positions are those of the set that x->hierarchy belongs to; x->set has the members of this host only.
// Nobody waits for another in a circle: what a member waits for, the others put on their streams before they wait.
#pragma once

#include "gpu/nccl_run.h"

// Bytes that the device's memory needs for a vector of nbytes.
size_t nccl_two_level_room(const struct hierarchy *h, size_t nbytes);
// In place, all but the prescaling; vector: on the device, with that much room.
bhvd_status nccl_two_level_allreduce(struct nccl_run *x, bhvd_op op, const struct reduction *reduction, unsigned char *vector,
                                  size_t nbytes);
// src: the root's; dst: on the device. root: a position.
bhvd_status nccl_two_level_broadcast(struct nccl_run *x, int root, const void *src, unsigned char *dst, size_t nbytes);
