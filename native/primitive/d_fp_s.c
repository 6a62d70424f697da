// D_FP_S: decentralized, full precision, synchronous. Every participant averages with its peers (peers.h):
//
//     dst_i = sum_j W_ij x_j      SHIFT_ONE: (x_i + x_p) / 2, who pauses keeps x_i
//                                 RING:      (x_i + x_{i-1} + x_{i+1}) / 3;  n = 2: (x_i + 2 x_p) / 3
//
// Added in the order written, in float32 (float64: in double), multiplied by the weight, rounded to the dtype once. Both
// sides of a pair compute the same bits. src is only read, so that weights may be sent while a backward pass uses them.
//
// The vector travels in segments; a few are on the wire while one is averaged. In place is safe: a segment is written
// when it has been sent.
// Wire: N elements to each peer: N per rank for SHIFT_ONE (0 in a pause), 2 N for RING (n = 2: N). Hierarchical: that
// much per host, and N elements within hosts for the mean and for its way back.
#include "primitive/primitive.h"

#include "collective/hierarchy.h"
#include "core/progress.h"
#include "primitive/peers.h"

enum {
    SEGMENT_BYTES = 128 * 1024,
    WINDOW = 4                  // segments in flight
};

struct slot {
    const unsigned char *mine;
    unsigned char *packed, *received[PEERS_MAX];
    struct transfer transfers[2 * PEERS_MAX];
};

struct averaging {
    bhvd_context *ctx;
    const struct span_list *list;
    struct link *links[PEERS_MAX];
    struct peers peers;
    bhvd_dtype dtype;
    double weight;              // of each value
    float *sum, *wide;          // one segment each
    struct slot slots[WINDOW];
};

static size_t segment_size(const struct averaging *a, size_t s)
{
    size_t left = a->list->nbytes - s * SEGMENT_BYTES;
    return left < SEGMENT_BYTES ? left : SEGMENT_BYTES;
}

static void exchange(struct averaging *a, size_t s)
{
    struct slot *slot = &a->slots[s % WINDOW];
    const size_t nbytes = segment_size(a, s);
    slot->mine = span_source(a->list, s * SEGMENT_BYTES, nbytes, slot->packed);
    for (int p = 0; p < a->peers.count; p++) {
        link_post_send(a->links[p], &slot->transfers[2 * p], slot->mine, nbytes);
        link_post_recv(a->links[p], &slot->transfers[2 * p + 1], slot->received[p], nbytes);
    }
    progress_look(a->ctx);
}

// dst = weight * (mine + times * all received), in the dtype itself.
static void average(const struct averaging *a, const struct slot *slot, void *dst, size_t count)
{
    const kernel_reduce_fn add = a->ctx->kernels.reduce[KERNEL_SUM][a->dtype];
    const void *sum = slot->mine;
    for (int i = 0; i < a->peers.count * a->peers.times; i++, sum = dst)
        add(dst, sum, slot->received[i % a->peers.count], count);
    a->ctx->kernels.scale[a->dtype](dst, dst, a->weight, count);
}

// The same, in float32.
static void average_wide(const struct averaging *a, const struct slot *slot, void *dst, size_t count)
{
    const struct kernel_table *kernels = &a->ctx->kernels;
    kernels->to_float[a->dtype](a->sum, slot->mine, count);
    for (int i = 0; i < a->peers.count * a->peers.times; i++) {
        kernels->to_float[a->dtype](a->wide, slot->received[i % a->peers.count], count);
        kernels->reduce[KERNEL_SUM][BHVD_FLOAT32](a->sum, a->sum, a->wide, count);
    }
    kernels->scale[BHVD_FLOAT32](a->sum, a->sum, a->weight, count);
    kernels->from_float[a->dtype](dst, a->sum, count);
}

static bhvd_status finish(struct averaging *a, size_t s)
{
    struct slot *slot = &a->slots[s % WINDOW];
    const size_t nbytes = segment_size(a, s), count = nbytes / bhvd_dtype_size(a->dtype);
    bhvd_status status = progress_transfers(a->ctx, slot->transfers, 2 * a->peers.count);
    if (status)
        return status;
    void *dst = span_target(a->list, s * SEGMENT_BYTES, nbytes, slot->packed);
    if (a->dtype == BHVD_FLOAT32 || a->dtype == BHVD_FLOAT64)
        average(a, slot, dst, count);
    else
        average_wide(a, slot, dst, count);
    span_store(a->list, s * SEGMENT_BYTES, nbytes, dst);
    return BHVD_OK;
}

static bhvd_status averaging_run(struct averaging *a)
{
    const size_t segments = (a->list->nbytes + SEGMENT_BYTES - 1) / SEGMENT_BYTES;
    enum { BUFFERS = WINDOW * (1 + PEERS_MAX), WIDE_BYTES = SEGMENT_BYTES / 2 * sizeof(float) };
    unsigned char *buffer = fusion_acquire(a->ctx, 1, BUFFERS * SEGMENT_BYTES + 2 * WIDE_BYTES);
    if (!buffer)
        return context_fail(a->ctx, BHVD_ERR_SYSTEM, "no memory for a fusion buffer of %d segments", BUFFERS);
    for (int i = 0; i < WINDOW; i++) {
        a->slots[i].packed = buffer;
        for (int p = 0; p < PEERS_MAX; p++)
            a->slots[i].received[p] = buffer + (size_t)(1 + p) * SEGMENT_BYTES;
        buffer += (size_t)(1 + PEERS_MAX) * SEGMENT_BYTES;
    }
    a->sum = (float *)buffer;
    a->wide = (float *)(buffer + WIDE_BYTES);
    bhvd_status status = BHVD_OK;
    for (size_t s = 0; s < segments + WINDOW - 1 && !status; s++) {
        if (s < segments)
            exchange(a, s);
        if (s >= WINDOW - 1)
            status = finish(a, s - (WINDOW - 1));
    }
    return status;
}

// Nobody to average with: the result is the value itself.
static void keep(const struct span_list *list)
{
    for (size_t i = 0; i < list->count; i++) {
        if (list->spans[i].dst != list->spans[i].src)
            collective_copy(list->spans[i].dst, list->spans[i].src, list->spans[i].nbytes);
    }
}

// Among the members of a set; the vector may be a shard of the operation's.
static bhvd_status average_with_peers(bhvd_context *ctx, struct process_set *set, const struct span_list *list,
                                      size_t begin, void *arg)
{
    const struct bhvd_handle *op = arg;
    struct averaging a = {
        .ctx = ctx,
        .list = list,
        .peers = peers_of(op->topology, set->size, set->rank, op->round),
        .dtype = op->tensors[0].dtype,
    };
    (void)begin;
    a.weight = 1.0 / (1 + a.peers.times * a.peers.count);
    for (int p = 0; p < a.peers.count; p++)
        a.links[p] = collective_link(ctx, set, a.peers.index[p]);
    if (a.peers.count)
        return averaging_run(&a);
    keep(list);
    return BHVD_OK;
}

// Hosts are the peers, each with the mean of its members.
static bhvd_status average_hosts(bhvd_context *ctx, struct process_set *set, const struct span_list *list,
                                 struct bhvd_handle *op)
{
    const bool several = set->hierarchy != NULL;
    const int members = several ? set->hierarchy->local->size : set->size;
    const struct reduction mean = primitive_within(ctx, op->tensors[0].dtype, 1.0, 1.0 / members);
    return several ? hierarchical_run(ctx, set, &mean, list, average_with_peers, op)
                   : allreduce_shared(ctx, set, &mean, list);
}

bhvd_status d_fp_s(bhvd_context *ctx, struct process_set *set, struct bhvd_handle *op, struct bhvd_error *error)
{
    struct span_list list = {0};
    bhvd_status status = op->hierarchical ? primitive_check_hosts(ctx, set, error) : BHVD_OK;
    if (!status)
        status = primitive_spans(ctx, op, &list);
    if (!status && list.nbytes)
        status = primitive_has_levels(set, op->kind, op->hierarchical) ? average_hosts(ctx, set, &list, op)
                                                                       : average_with_peers(ctx, set, &list, 0, op);
    span_list_fini(&list);
    return status;
}
