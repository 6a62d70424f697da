// Collectives in two levels, for process sets on several hosts: NCCL among the members of a host, and between the hosts the
// CPU transports, through pinned memory. Every member with an index below h->shards (hierarchy.h) talks to its counterparts.
//
//     allreduce    reduce-scatter within the host | shard to the host | allreduce among its owners | back | allgather
//     broadcast    within the root's host | one member of each host, a tree | within the other hosts
//     allgather    own part to the host | allgather among counterparts | back | each member spreads what it has
//
// A vector is worked off in pieces, so that the GPU reduces one while the wire has the one before. Nobody waits for another
// in a circle: a member puts the reduction of a piece on its stream before it waits for the wire with the one before.
#include <stdlib.h>

#include "collective/nccl_run.h"

enum {
    SHARD_MAX_BYTES = 4 << 20,
    ALIGNMENT = 256                     // of shards, for vectors in NCCL's kernels
};

static int is_there(bhvd_context *ctx, void *arg)
{
    void **device_and_event = arg;
    struct bhvd_device *device = device_and_event[0];
    (void)ctx;
    return device->ops->event_query(device, device_and_event[1]) != DEVICE_NOT_READY;
}

// The host may use the buffer when the stream has come here: to be waited for.
static bhvd_status mark(struct nccl_run *x, struct device_buffer *buffer)
{
    return nccl_run_checked(x, x->device->ops->event_record(x->device, buffer->ready, x->stream));
}

static bhvd_status wait_for(struct nccl_run *x, struct device_buffer *buffer)
{
    void *device_and_event[] = {x->device, buffer->ready};
    bhvd_status status = nccl_wait(x->ctx, is_there, device_and_event);
    return status ? status : nccl_run_checked(x, x->device->ops->event_query(x->device, buffer->ready));
}

static bhvd_status to_host(struct nccl_run *x, struct device_buffer *pinned, const void *src, size_t nbytes)
{
    bhvd_status status = nccl_run_copy(x, pinned->data, src, nbytes);
    return status ? status : mark(x, pinned);
}

static bhvd_status from_host(struct nccl_run *x, void *dst, struct device_buffer *pinned, size_t nbytes)
{
    bhvd_status status = nccl_run_copy(x, dst, pinned->data, nbytes);
    return status ? status : mark(x, pinned);
}

// ------------------------------------------------------------------------------------------------------- allreduce

// Of the piece that begins a vector of nbytes: all shards have it.
static size_t shard_of(const struct hierarchy *h, size_t nbytes)
{
    const size_t shards = (size_t)h->shards, shard = (nbytes + shards - 1) / shards;
    return shard >= SHARD_MAX_BYTES ? SHARD_MAX_BYTES : (shard + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
}

size_t nccl_levels_room(const struct hierarchy *h, size_t nbytes)
{
    const size_t most = (size_t)SHARD_MAX_BYTES * (size_t)h->shards, whole = nbytes / most * most;
    return whole + shard_of(h, nbytes - whole) * (size_t)h->shards;
}

static bool owns_shard(const struct nccl_run *x) { return x->levels->index < x->levels->shards; }

// The host's sums, each at its shard on the owner, and from there to pinned memory.
static bhvd_status begin_piece(struct nccl_run *x, bhvd_op op, bhvd_dtype dtype, unsigned char *piece, size_t shard,
                               struct device_buffer *pinned)
{
    const struct hierarchy *h = x->levels;
    const enum nccl_type type = nccl_run_type(dtype);
    const size_t count = shard / bhvd_dtype_size(dtype);
    unsigned char *mine = piece + shard * (size_t)h->index;
    bhvd_status status;
    if (x->set->size == h->shards) {
        status = nccl_run_enqueued(x, x->nccl->reduce_scatter(piece, mine, count, type, nccl_run_op(op), x->group->comm,
                                                              x->stream));
    } else {
        nccl_result inside = x->nccl->group_start();
        for (int i = 0; i < h->shards; i++) {
            unsigned char *at = piece + shard * (size_t)i;
            nccl_run_keep(&inside, x->nccl->reduce(at, at, count, type, nccl_run_op(op), i, x->group->comm, x->stream));
        }
        status = nccl_run_group_end(x, inside);
    }
    return status || !owns_shard(x) ? status : to_host(x, pinned, mine, shard);
}

static bhvd_status exchange_shard(struct nccl_run *x, const struct reduction *across, size_t shard,
                                  struct device_buffer *pinned)
{
    struct span span = {pinned->data, pinned->data, shard};
    bhvd_status status = wait_for(x, pinned);
    return status ? status : allreduce_links(x->ctx, x->levels->cross, across, &(struct span_list){&span, 1, 1, shard});
}

static bhvd_status end_piece(struct nccl_run *x, unsigned char *piece, size_t shard, struct device_buffer *pinned)
{
    const struct hierarchy *h = x->levels;
    unsigned char *mine = piece + shard * (size_t)h->index;
    bhvd_status status = owns_shard(x) ? from_host(x, mine, pinned, shard) : BHVD_OK;
    if (status)
        return status;
    if (x->set->size == h->shards)
        return nccl_run_enqueued(x, x->nccl->all_gather(mine, piece, shard, NCCL_UINT8, x->group->comm, x->stream));
    nccl_result inside = x->nccl->group_start();
    for (int i = 0; i < h->shards; i++) {
        unsigned char *at = piece + shard * (size_t)i;
        nccl_run_keep(&inside, x->nccl->broadcast(at, at, shard, NCCL_UINT8, i, x->group->comm, x->stream));
    }
    return nccl_run_group_end(x, inside);
}

bhvd_status nccl_levels_allreduce(struct nccl_run *x, bhvd_op op, const struct reduction *reduction, unsigned char *vector,
                                  size_t nbytes)
{
    const struct hierarchy *h = x->levels;
    struct reduction across = *reduction;
    struct device_buffer *pinned[2] = {NULL, NULL};     // one on the wire, one on its way from the GPU
    size_t shard = shard_of(h, nbytes);
    bhvd_status status = BHVD_OK;
    across.prescale = 1.0;
    for (int i = 0; i < 2 && owns_shard(x) && !status; i++)
        status = nccl_run_scratch(x, MEMORY_PINNED, shard, &pinned[i]);
    if (!status)
        status = begin_piece(x, op, reduction->dtype, vector, shard, pinned[0]);
    for (size_t begin = 0, number = 0; begin < nbytes && !status; number++) {
        const size_t next = begin + shard * (size_t)h->shards;
        size_t next_shard = 0;
        if (next < nbytes) {
            next_shard = shard_of(h, nbytes - next);
            status = begin_piece(x, op, reduction->dtype, vector + next, next_shard, pinned[(number + 1) % 2]);
        }
        if (!status && owns_shard(x))
            status = exchange_shard(x, &across, shard, pinned[number % 2]);
        if (!status)
            status = end_piece(x, vector + begin, shard, pinned[number % 2]);
        begin = next;
        shard = next_shard;
    }
    return status;
}

// ------------------------------------------------------------------------------------------------------- broadcast

static bhvd_status broadcast_within(struct nccl_run *x, int root, const void *src, void *dst, size_t nbytes)
{
    return nccl_run_enqueued(x, x->nccl->broadcast(src, dst, nbytes, NCCL_UINT8, root, x->group->comm, x->stream));
}

// Between the hosts, of the members with one index. is_source: of the root's host.
static bhvd_status broadcast_across(struct nccl_run *x, int host, bool is_source, unsigned char *data, size_t nbytes,
                                    struct device_buffer *pinned)
{
    bhvd_status status = is_source ? to_host(x, pinned, data, nbytes) : BHVD_OK;
    if (!status)
        status = wait_for(x, pinned);                   // for what is sent, or until the room is free
    if (!status)
        status = broadcast_tree(x->ctx, x->levels->cross, host, pinned->data, pinned->data, nbytes, NULL);
    return status || is_source ? status : from_host(x, data, pinned, nbytes);
}

bhvd_status nccl_levels_broadcast(struct nccl_run *x, int root, const void *src, unsigned char *dst, size_t nbytes)
{
    const struct hierarchy *h = x->levels;
    int host, index;
    hierarchy_find(h, root, &host, &index);
    const bool is_source = h->host == host;
    const int bridge = index < h->shards ? index : 0;   // exists on every host
    struct device_buffer *pinned[2] = {NULL, NULL};
    bhvd_status status = BHVD_OK;
    for (int i = 0; i < 2 && h->index == bridge && !status; i++)
        status = nccl_run_scratch(x, MEMORY_PINNED, nbytes < SHARD_MAX_BYTES ? nbytes : SHARD_MAX_BYTES, &pinned[i]);
    if (!status && is_source)
        status = broadcast_within(x, index, src, dst, nbytes);
    for (size_t begin = 0, number = 0; begin < nbytes && !status; begin += SHARD_MAX_BYTES, number++) {
        const size_t n = nbytes - begin < SHARD_MAX_BYTES ? nbytes - begin : SHARD_MAX_BYTES;
        if (h->index == bridge)
            status = broadcast_across(x, host, is_source, dst + begin, n, pinned[number % 2]);
        if (!status && !is_source)
            status = broadcast_within(x, bridge, dst + begin, dst + begin, n);
    }
    return status;
}

// ------------------------------------------------------------------------------------------------------- allgather

// What the members with this rank's index have, to their places on this rank's device.
static bhvd_status gather_across(struct nccl_run *x, const void *src, unsigned char *dst, const size_t *part,
                                 const size_t *place, size_t *cross_part)
{
    const struct hierarchy *h = x->levels;
    struct device_buffer *own, *all;
    size_t nbytes = 0;
    for (int host = 0; host < h->hosts; host++)
        nbytes += cross_part[host] = part[hierarchy_member(h, host, h->index)];
    bhvd_status status = nccl_run_scratch(x, MEMORY_PINNED, cross_part[h->host], &own);
    if (!status)
        status = nccl_run_scratch(x, MEMORY_PINNED, nbytes, &all);
    if (!status)
        status = to_host(x, own, src, cross_part[h->host]);
    if (!status)
        status = wait_for(x, own);
    if (!status)
        status = allgather_pairwise(x->ctx, h->cross, own->data, all->data, cross_part);
    const unsigned char *at = all->data;
    for (int host = 0; host < h->hosts && !status; at += cross_part[host++])
        status = nccl_run_copy(x, dst + place[hierarchy_member(h, host, h->index)], at, cross_part[host]);
    return status;
}

bhvd_status nccl_levels_allgather(struct nccl_run *x, const void *src, unsigned char *dst, const size_t *part)
{
    const struct hierarchy *h = x->levels;
    const int members = h->hosts * h->shards;
    size_t *place = malloc((size_t)(members + h->hosts) * sizeof *place), total = 0;
    if (!place)
        return context_fail(x->ctx, BHVD_ERR_SYSTEM, "no memory for a collective of %d ranks", members);
    for (int i = 0; i < members; total += part[i++])
        place[i] = total;
    bhvd_status status = gather_across(x, src, dst, part, place, place + members);
    if (!status) {
        nccl_result inside = x->nccl->group_start();
        for (int i = 0; i < members; i++) {
            int host, index;
            hierarchy_find(h, i, &host, &index);
            if (part[i])
                nccl_run_keep(&inside, x->nccl->broadcast(dst + place[i], dst + place[i], part[i], NCCL_UINT8, index,
                                                          x->group->comm, x->stream));
        }
        status = nccl_run_group_end(x, inside);
    }
    free(place);
    return status;
}
