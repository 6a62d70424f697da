// Collectives in two levels, for process sets on several hosts: NCCL among the members of a host, and between the hosts the
// CPU transports, through pinned memory.
//
//     nccl_levels.c                  what they share; allreduce and broadcast
//     nccl_levels_reducescatter.c
//     nccl_levels_allgather.c
//     nccl_levels_alltoall.c
//
// Positions, and part[] by position, are those of x->whole; x->set has the members of this host only.
// Nobody waits for another in a circle: what a member waits for, the others put on their streams before they wait.
#ifndef BHVD_GPU_NCCL_LEVELS_H
#define BHVD_GPU_NCCL_LEVELS_H

#include "gpu/nccl_run.h"

enum {
    LEVELS_SHARD_MAX_BYTES = 4 << 20,   // what a member has on the wire at a time
    LEVELS_ALIGNMENT = 256              // of shards, for vectors in NCCL's kernels
};

// Bytes that the device's memory needs for a vector of nbytes.
size_t nccl_levels_room(const struct hierarchy *h, size_t nbytes);
// In place, all but the prescaling; vector: on the device, with that much room.
bhvd_status nccl_levels_allreduce(struct nccl_run *x, bhvd_op op, const struct reduction *reduction, unsigned char *vector,
                                  size_t nbytes);
// src: the root's; dst: on the device. root: a position.
bhvd_status nccl_levels_broadcast(struct nccl_run *x, int root, const void *src, unsigned char *dst, size_t nbytes);
// All but the prescaling. dst: on the device, this member's part.
bhvd_status nccl_levels_reducescatter(struct nccl_run *x, bhvd_op op, const struct reduction *reduction,
                                      const unsigned char *src, unsigned char *dst, const size_t *part);
// dst: on the device, all parts.
bhvd_status nccl_levels_allgather(struct nccl_run *x, const void *src, unsigned char *dst, const size_t *part);
// bytes: from * size + to; src and dst: on the device, the parts one after the other.
bhvd_status nccl_levels_alltoall(struct nccl_run *x, const unsigned char *src, unsigned char *dst,
                                 const struct parts *parts);

// ------------------------------------------------------------------------------------------------------ what they share

static inline size_t nccl_levels_aligned(size_t nbytes)
{
    return (nbytes + LEVELS_ALIGNMENT - 1) / LEVELS_ALIGNMENT * LEVELS_ALIGNMENT;
}

// Talks to its counterparts on the other hosts about a shard.
static inline bool nccl_levels_owns_shard(const struct hierarchy *h) { return h->index < h->shards; }

// The host may use the buffer when the stream has come to where it was marked: to be waited for.
bhvd_status nccl_levels_mark(struct nccl_run *x, struct device_buffer *pinned);
bhvd_status nccl_levels_wait_for(struct nccl_run *x, struct device_buffer *pinned);
// Copied, and marked.
bhvd_status nccl_levels_to_host(struct nccl_run *x, struct device_buffer *pinned, const void *src, size_t nbytes);

// In place: the host's sums of each of the shards that lie one after the other, at their place on their owner.
bhvd_status nccl_levels_reduce(struct nccl_run *x, bhvd_op op, bhvd_dtype dtype, unsigned char *shards, size_t shard);

// A vector worked off in pieces, so that the GPU has the next while one is on the wire.
struct levels_pieces {
    size_t count, shard_nbytes;         // pinned memory for a piece, of the owner of a shard
    void *arg;                          // for all of them
    // On the stream, and for owners the shard to pinned memory, marked.
    bhvd_status (*begin)(struct nccl_run *x, void *arg, size_t number, struct device_buffer *pinned);
    // Owners only, with the shard in pinned memory: the result there.
    bhvd_status (*exchange)(struct nccl_run *x, void *arg, size_t number, unsigned char *shard);
    // On the stream. pinned may be used again from there.
    bhvd_status (*end)(struct nccl_run *x, void *arg, size_t number, struct device_buffer *pinned);
};
bhvd_status nccl_levels_run_pieces(struct nccl_run *x, const struct levels_pieces *pieces);

#endif
