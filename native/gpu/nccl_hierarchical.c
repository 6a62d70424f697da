// Hierarchical allreduce and broadcast.
//
//     allreduce    reduce-scatter within hosts | shard to the host | allreduce among its owners | shard back | allgather
//     broadcast    within the root's host | one member of each host, a tree | within the other hosts
#include "gpu/nccl_execution.h"

#include "base/size.h"

enum { SHARD_MAX_BYTES = 4 << 20 };     // per member, on the wire at a time

// Marks the point in the stream after which the host may use the buffer.
static bhvd_status mark(struct nccl_execution *x, struct device_buffer *pinned)
{
    return nccl_execution_checked(x, x->device->ops->event_record(x->device, pinned->ready, x->stream));
}

static bhvd_status to_host(struct nccl_execution *x, struct device_buffer *pinned, const void *src, size_t nbytes)
{
    bhvd_status status = nccl_execution_copy(x, pinned->data, src, nbytes);
    return status ?: mark(x, pinned);
}

// ------------------------------------------------------------------------------------------------------- allreduce

struct allreduce {
    bhvd_op op;
    struct reduction across;            // prescaled on the GPU
    unsigned char *vector;
    size_t nbytes;
};

// A part of the vector: equal shards, one after the other. While one piece is on the wire, the GPU works on the next.
struct gpu_piece {
    unsigned char *at;
    size_t shard;                       // bytes
    struct device_buffer *pinned;       // NULL: this member owns no shard, and does not communicate with other hosts
};

static size_t longest_piece(const struct hierarchy *h) { return (size_t)SHARD_MAX_BYTES * (size_t)h->shards; }

// Bytes of each shard of the piece that begins a vector of nbytes.
static size_t shard_of(const struct hierarchy *h, size_t nbytes)
{
    const size_t shards = (size_t)h->shards, shard = (nbytes + shards - 1) / shards;
    return shard >= SHARD_MAX_BYTES ? SHARD_MAX_BYTES : size_round_up(shard, NCCL_ALIGNMENT);
}

size_t nccl_hierarchical_nbytes(const struct hierarchy *h, size_t nbytes)
{
    const size_t most = longest_piece(h), whole = nbytes / most * most;
    return whole + shard_of(h, nbytes - whole) * (size_t)h->shards;
}

// Two pinned buffers alternate. In stream order, `begin` uses a buffer after the `end` of two pieces before.
static struct gpu_piece piece_of(const struct hierarchy *h, const struct allreduce *all, struct device_buffer *const *pinned,
                             size_t number)
{
    const size_t begin = number * longest_piece(h);
    return (struct gpu_piece){all->vector + begin, shard_of(h, all->nbytes - begin), pinned[number % 2]};
}

// Reduces within the host, to the shard at its owner, and copies that to pinned memory, marked.
static bhvd_status begin(struct nccl_execution *x, const struct allreduce *all, const struct gpu_piece *piece)
{
    const struct nccl_parts shards = {.each = piece->shard, .count = x->hierarchy->shards};
    unsigned char *mine = piece->at + piece->shard * (size_t)x->hierarchy->index;
    bhvd_status status = nccl_execution_reduce_scatter(x, all->op, all->across.dtype, piece->at, mine, &shards);
    return status || !piece->pinned ? status : to_host(x, piece->pinned, mine, piece->shard);
}

// Owners only: reduces the shard across hosts, in pinned memory.
static bhvd_status exchange(struct nccl_execution *x, const struct allreduce *all, const struct gpu_piece *piece)
{
    bhvd_status status = nccl_execution_wait(x, piece->pinned->ready);
    struct span span = {piece->pinned->data, piece->pinned->data, piece->shard};
    struct span_list list = {&span, 1, 1, piece->shard};
    struct plan plan = {0};
    if (status)
        return status;
    allreduce_plan(&plan, x->exec, x->hierarchy->cross, &all->across, &list);
    return plan_execute(x->exec, &plan);
}

static bhvd_status end(struct nccl_execution *x, const struct gpu_piece *piece)
{
    const struct nccl_parts shards = {.each = piece->shard, .count = x->hierarchy->shards};
    unsigned char *mine = piece->at + piece->shard * (size_t)x->hierarchy->index;
    bhvd_status status = piece->pinned ? nccl_execution_copy(x, mine, piece->pinned->data, piece->shard) : BHVD_OK;
    return status ?: nccl_execution_all_gather(x, mine, piece->at, &shards);
}

bhvd_status nccl_hierarchical_allreduce(struct nccl_execution *x, bhvd_op op, const struct reduction *reduction,
                                        unsigned char *vector, size_t nbytes)
{
    const struct hierarchy *h = x->hierarchy;
    const size_t count = (nbytes + longest_piece(h) - 1) / longest_piece(h);
    struct allreduce all = {.op = op, .across = *reduction, .vector = vector, .nbytes = nbytes};
    struct device_buffer *pinned[2] = {NULL, NULL};
    bhvd_status status = BHVD_OK;
    all.across.prescale = 1.0;
    for (int i = 0; i < 2 && h->index < h->shards && !status; i++)
        status = nccl_execution_checked(x, device_scratch_buffer(&x->scratch, MEMORY_PINNED, shard_of(h, nbytes), &pinned[i]));
    struct gpu_piece next = piece_of(h, &all, pinned, 0);
    status = status ?: begin(x, &all, &next);
    for (size_t number = 0; number < count && !status; number++) {
        const struct gpu_piece piece = next;
        if (number + 1 < count) {
            next = piece_of(h, &all, pinned, number + 1);
            status = begin(x, &all, &next);
        }
        if (!status && piece.pinned)
            status = exchange(x, &all, &piece);
        status = status ?: end(x, &piece);
    }
    return status;
}

// ------------------------------------------------------------------------------------------------------- broadcast

static bhvd_status broadcast_within(struct nccl_execution *x, int root, const void *src, void *dst, size_t nbytes)
{
    return nccl_execution_enqueued(x, x->nccl->broadcast(src, dst, nbytes, NCCL_UINT8, root, x->comm->handle, x->stream));
}

// Broadcasts between the members with one index on each host. is_source: this is the root's host.
static bhvd_status broadcast_across(struct nccl_execution *x, int host, bool is_source, unsigned char *data, size_t nbytes,
                                    struct device_buffer *pinned)
{
    struct plan plan = {0};
    bhvd_status status = is_source ? to_host(x, pinned, data, nbytes) : BHVD_OK;
    status = status ?: nccl_execution_wait(x, pinned->ready);  // until the data is there, or the buffer is free
    if (status)
        return status;
    broadcast_plan(&plan, x->hierarchy->cross, host, pinned->data, pinned->data, nbytes, false);
    status = plan_execute(x->exec, &plan);
    if (status || is_source)
        return status;
    status = nccl_execution_copy(x, data, pinned->data, nbytes);
    return status ?: mark(x, pinned);
}

bhvd_status nccl_hierarchical_broadcast(struct nccl_execution *x, int root, const void *src, unsigned char *dst, size_t nbytes)
{
    const struct hierarchy *h = x->hierarchy;
    int host, index;
    hierarchy_find(h, root, &host, &index);
    const bool is_source = h->host == host;
    const int bridge = index < h->shards ? index : 0;   // exists on every host
    const size_t most = nbytes < SHARD_MAX_BYTES ? nbytes : SHARD_MAX_BYTES;
    struct device_buffer *pinned[2] = {NULL, NULL};
    bhvd_status status = BHVD_OK;
    for (int i = 0; i < 2 && h->index == bridge && !status; i++)
        status = nccl_execution_checked(x, device_scratch_buffer(&x->scratch, MEMORY_PINNED, most, &pinned[i]));
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
