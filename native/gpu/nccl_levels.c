// Allreduce and broadcast in two levels, and what all collectives in two levels share.
//
//     allreduce    reduce-scatter within the host | shard to the host | allreduce among its owners | back | allgather
//     broadcast    within the root's host | one member of each host, a tree | within the other hosts
#include "gpu/nccl_levels.h"

static int is_there(struct run *run, void *arg)
{
    void **device_and_event = arg;
    struct bhvd_device *device = device_and_event[0];
    (void)run;
    return device->ops->event_query(device, device_and_event[1]) != DEVICE_NOT_READY;
}

bhvd_status nccl_levels_mark(struct nccl_run *x, struct device_buffer *pinned)
{
    return nccl_run_checked(x, x->device->ops->event_record(x->device, pinned->ready, x->stream));
}

bhvd_status nccl_levels_wait_for(struct nccl_run *x, struct device_buffer *pinned)
{
    void *device_and_event[] = {x->device, pinned->ready};
    bhvd_status status = run_until_gpu(x->run, is_there, device_and_event);
    return status ? status : nccl_run_checked(x, x->device->ops->event_query(x->device, pinned->ready));
}

bhvd_status nccl_levels_to_host(struct nccl_run *x, struct device_buffer *pinned, const void *src, size_t nbytes)
{
    bhvd_status status = nccl_run_copy(x, pinned->data, src, nbytes);
    return status ? status : nccl_levels_mark(x, pinned);
}

bhvd_status nccl_levels_reduce(struct nccl_run *x, bhvd_op op, bhvd_dtype dtype, unsigned char *shards, size_t shard)
{
    const struct hierarchy *h = x->levels;
    const enum nccl_type type = nccl_run_type(dtype);
    const size_t count = shard / bhvd_dtype_size(dtype);
    if (x->set->size == h->shards)
        return nccl_run_enqueued(x, x->nccl->reduce_scatter(shards, shards + shard * (size_t)h->index, count, type,
                                                            nccl_run_op(op), x->group->comm, x->stream));
    nccl_result inside = x->nccl->group_start();
    for (int i = 0; i < h->shards; i++) {
        unsigned char *at = shards + shard * (size_t)i;
        nccl_run_keep(&inside, x->nccl->reduce(at, at, count, type, nccl_run_op(op), i, x->group->comm, x->stream));
    }
    return nccl_run_group_end(x, inside);
}

// With two pinned buffers, taken in turn. What `begin` marks in one comes after all that `end` did with it two pieces before.
bhvd_status nccl_levels_run_pieces(struct nccl_run *x, const struct levels_pieces *pieces)
{
    const bool owns_shard = nccl_levels_owns_shard(x->levels);
    struct device_buffer *pinned[2] = {NULL, NULL};
    bhvd_status status = BHVD_OK;
    for (int i = 0; i < 2 && owns_shard && !status; i++)
        status = nccl_run_scratch(x, MEMORY_PINNED, pieces->shard_nbytes, &pinned[i]);
    if (!status && pieces->count)
        status = pieces->begin(x, pieces->arg, 0, pinned[0]);
    for (size_t number = 0; number < pieces->count && !status; number++) {
        struct device_buffer *mine = pinned[number % 2];
        if (number + 1 < pieces->count)
            status = pieces->begin(x, pieces->arg, number + 1, pinned[(number + 1) % 2]);
        if (!status && owns_shard)
            status = nccl_levels_wait_for(x, mine);
        if (!status && owns_shard)
            status = pieces->exchange(x, pieces->arg, number, mine->data);
        if (!status)
            status = pieces->end(x, pieces->arg, number, mine);
    }
    return status;
}

// ------------------------------------------------------------------------------------------------------- allreduce

struct allreduce {
    bhvd_op op;
    struct reduction across;            // prescaled on the GPU
    unsigned char *vector;
    size_t nbytes;
};

static size_t longest_piece(const struct hierarchy *h) { return (size_t)LEVELS_SHARD_MAX_BYTES * (size_t)h->shards; }

// Of the piece that begins a vector of nbytes: all shards have it.
static size_t shard_of(const struct hierarchy *h, size_t nbytes)
{
    const size_t shards = (size_t)h->shards, shard = (nbytes + shards - 1) / shards;
    return shard >= LEVELS_SHARD_MAX_BYTES ? LEVELS_SHARD_MAX_BYTES : nccl_levels_aligned(shard);
}

size_t nccl_levels_room(const struct hierarchy *h, size_t nbytes)
{
    const size_t most = longest_piece(h), whole = nbytes / most * most;
    return whole + shard_of(h, nbytes - whole) * (size_t)h->shards;
}

// Where a piece begins; *shard: how long its shards are.
static unsigned char *piece_at(const struct hierarchy *h, const struct allreduce *all, size_t number, size_t *shard)
{
    const size_t begin = number * longest_piece(h);
    *shard = shard_of(h, all->nbytes - begin);
    return all->vector + begin;
}

// The host's sums, each at its shard on the owner, and from there to pinned memory.
static bhvd_status begin_piece(struct nccl_run *x, void *arg, size_t number, struct device_buffer *pinned)
{
    const struct hierarchy *h = x->levels;
    const struct allreduce *all = arg;
    size_t shard;
    unsigned char *piece = piece_at(h, all, number, &shard);
    bhvd_status status = nccl_levels_reduce(x, all->op, all->across.dtype, piece, shard);
    return status || !pinned ? status : nccl_levels_to_host(x, pinned, piece + shard * (size_t)h->index, shard);
}

static bhvd_status exchange_shard(struct nccl_run *x, void *arg, size_t number, unsigned char *data)
{
    const struct allreduce *all = arg;
    size_t shard;
    piece_at(x->levels, all, number, &shard);
    struct span span = {data, data, shard};
    return allreduce_links(x->run, x->levels->cross, &all->across, &(struct span_list){&span, 1, 1, shard});
}

static bhvd_status end_piece(struct nccl_run *x, void *arg, size_t number, struct device_buffer *pinned)
{
    const struct hierarchy *h = x->levels;
    size_t shard;
    unsigned char *piece = piece_at(h, arg, number, &shard), *mine = piece + shard * (size_t)h->index;
    bhvd_status status = pinned ? nccl_run_copy(x, mine, pinned->data, shard) : BHVD_OK;
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
    const size_t most = longest_piece(x->levels);
    struct allreduce all = {.op = op, .across = *reduction, .vector = vector, .nbytes = nbytes};
    all.across.prescale = 1.0;
    return nccl_levels_run_pieces(x, &(struct levels_pieces){
        .count = (nbytes + most - 1) / most, .shard_nbytes = shard_of(x->levels, nbytes), .arg = &all,
        .begin = begin_piece, .exchange = exchange_shard, .end = end_piece});
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
    bhvd_status status = is_source ? nccl_levels_to_host(x, pinned, data, nbytes) : BHVD_OK;
    if (!status)
        status = nccl_levels_wait_for(x, pinned);       // for what is sent, or until the room is free
    if (!status)
        status = broadcast_links(x->run, x->levels->cross, host, pinned->data, pinned->data, nbytes, NULL);
    if (status || is_source)
        return status;
    status = nccl_run_copy(x, data, pinned->data, nbytes);
    return status ? status : nccl_levels_mark(x, pinned);
}

bhvd_status nccl_levels_broadcast(struct nccl_run *x, int root, const void *src, unsigned char *dst, size_t nbytes)
{
    const struct hierarchy *h = x->levels;
    int host, index;
    hierarchy_find(h, root, &host, &index);
    const bool is_source = h->host == host;
    const int bridge = index < h->shards ? index : 0;   // exists on every host
    const size_t most = nbytes < LEVELS_SHARD_MAX_BYTES ? nbytes : LEVELS_SHARD_MAX_BYTES;
    struct device_buffer *pinned[2] = {NULL, NULL};
    bhvd_status status = BHVD_OK;
    for (int i = 0; i < 2 && h->index == bridge && !status; i++)
        status = nccl_run_scratch(x, MEMORY_PINNED, most, &pinned[i]);
    if (!status && is_source)
        status = broadcast_within(x, index, src, dst, nbytes);
    for (size_t begin = 0, number = 0; begin < nbytes && !status; begin += most, number++) {
        const size_t n = nbytes - begin < most ? nbytes - begin : most;
        if (h->index == bridge)
            status = broadcast_across(x, host, is_source, dst + begin, n, pinned[number % 2]);
        if (!status && !is_source)
            status = broadcast_within(x, bridge, dst + begin, dst + begin, n);
    }
    return status;
}
