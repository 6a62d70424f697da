// D_FP_S: decentralized, full precision, synchronous. Every participant averages with its peers (peers.h):
//
//     dst_i = sum_j W_ij x_j      SHIFT_ONE: (x_i + x_p) / 2, who pauses keeps x_i
//                                 RING:      (x_i + x_{i-1} + x_{i+1}) / 3;  n = 2: (x_i + 2 x_p) / 3
//
// Hierarchical, with hosts that hold different numbers of ranks, their shares are those of peers_shares().
//
// Added in the order written, in float32 (float64: in double), multiplied by the weight, rounded to the dtype once. Both
// sides of a pair compute the same bits. src is only read, so that weights may be sent while a backward pass uses them.
//
// The vector travels in segments; a few are on the wire while one is averaged. In place is safe: a segment is written
// when it has been sent.
// Wire: N elements to each peer: N per rank for SHIFT_ONE (0 in a pause), 2 N for RING (n = 2: N). Hierarchical: that
// much per host, and N elements within hosts for the mean and for its way back.
#include "primitive/primitive.h"

#include "run/hierarchy.h"
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
    struct run *run;
    const struct span_list *list;
    struct link *links[PEERS_MAX];
    struct peers peers;
    bhvd_dtype dtype;
    double weight;              // of each value; or, of what their shares make of them
    struct shares shares;
    bool is_weighted;           // the shares differ
    void *sum, *wide;           // one segment each, in float32 or float64
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
        link_post_send(a->links[p], a->run->connections.started, &slot->transfers[2 * p], slot->mine, nbytes);
        link_post_recv(a->links[p], a->run->connections.started, &slot->transfers[2 * p + 1], slot->received[p], nbytes);
    }
    run_look(a->run);
}

// dst = weight * (mine + times * all received), in the dtype itself.
static void average(const struct averaging *a, const struct slot *slot, void *dst, size_t count)
{
    const kernel_reduce_fn add = a->run->kernels.reduce[KERNEL_SUM][a->dtype];
    const void *sum = slot->mine;
    for (int i = 0; i < a->peers.count * a->peers.times; i++, sum = dst)
        add(dst, sum, slot->received[i % a->peers.count], count);
    a->run->kernels.scale[a->dtype](dst, dst, a->weight, count);
}

// The same, in float32.
static void average_wide(const struct averaging *a, const struct slot *slot, void *dst, size_t count)
{
    const struct kernel_table *kernels = &a->run->kernels;
    kernels->to_float[a->dtype](a->sum, slot->mine, count);
    for (int i = 0; i < a->peers.count * a->peers.times; i++) {
        kernels->to_float[a->dtype](a->wide, slot->received[i % a->peers.count], count);
        kernels->reduce[KERNEL_SUM][BHVD_FLOAT32](a->sum, a->sum, a->wide, count);
    }
    kernels->scale[BHVD_FLOAT32](a->sum, a->sum, a->weight, count);
    kernels->from_float[a->dtype](dst, a->sum, count);
}

// Each value times its share, in float32 (float64: in double). So both sides of a pair compute the same bits.
static void average_weighted(const struct averaging *a, const struct slot *slot, void *dst, size_t count)
{
    const struct kernel_table *kernels = &a->run->kernels;
    const bhvd_dtype wide = a->dtype == BHVD_FLOAT64 ? BHVD_FLOAT64 : BHVD_FLOAT32;
    for (int i = -1; i < a->peers.count; i++) {
        const void *value = i < 0 ? slot->mine : slot->received[i];
        void *term = i < 0 ? a->sum : a->wide;
        if (a->dtype != wide) {
            kernels->to_float[a->dtype](term, value, count);
            value = term;
        }
        kernels->scale[wide](term, value, i < 0 ? a->shares.own : a->shares.peer[i], count);
        if (i >= 0)
            kernels->reduce[KERNEL_SUM][wide](a->sum, a->sum, a->wide, count);
    }
    kernels->scale[wide](a->dtype == wide ? dst : a->sum, a->sum, a->weight, count);
    if (a->dtype != wide)
        kernels->from_float[a->dtype](dst, a->sum, count);
}

static bhvd_status finish(struct averaging *a, size_t s)
{
    struct slot *slot = &a->slots[s % WINDOW];
    const size_t nbytes = segment_size(a, s), count = nbytes / bhvd_dtype_size(a->dtype);
    bhvd_status status = run_transfers(a->run, slot->transfers, 2 * a->peers.count);
    if (status)
        return status;
    void *dst = span_target(a->list, s * SEGMENT_BYTES, nbytes, slot->packed);
    if (a->is_weighted)
        average_weighted(a, slot, dst, count);
    else if (a->dtype == BHVD_FLOAT32 || a->dtype == BHVD_FLOAT64)
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
    unsigned char *buffer = fusion_acquire(a->run, 1, BUFFERS * SEGMENT_BYTES + 2 * WIDE_BYTES);
    if (!buffer)
        return run_fail(a->run, BHVD_ERR_SYSTEM, "no memory for a fusion buffer of %d segments", BUFFERS);
    for (int i = 0; i < WINDOW; i++) {
        a->slots[i].packed = buffer;
        for (int p = 0; p < PEERS_MAX; p++)
            a->slots[i].received[p] = buffer + (size_t)(1 + p) * SEGMENT_BYTES;
        buffer += (size_t)(1 + PEERS_MAX) * SEGMENT_BYTES;
    }
    a->sum = buffer;
    a->wide = buffer + WIDE_BYTES;
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
            span_copy(list->spans[i].dst, list->spans[i].src, list->spans[i].nbytes);
    }
}

// What is averaged, and between whom.
struct job {
    const struct work *op;
    const struct hierarchy *hosts;      // NULL: between ranks
};

// Among the members of a group, each of which stands for its host where there are hosts; the vector may be a shard of the
// operation's.
static bhvd_status average_with_peers(struct run *run, struct group *group, const struct span_list *list,
                                      size_t begin, void *arg, struct flight **flight)
{
    const struct job *job = arg;
    const struct work *op = job->op;
    struct averaging a = {
        .run = run,
        .list = list,
        .peers = peers_of(op->topology, group->size, group->rank, op->round),
        .dtype = op->tensors[0].dtype,
    };
    (void)begin, (void)flight;
    a.weight = 1.0 / (1 + a.peers.times * a.peers.count);
    int sizes[PEERS_MAX] = {0};
    for (int p = 0; p < a.peers.count; p++) {
        a.links[p] = group_link(run, group, a.peers.index[p]);
        sizes[p] = job->hosts ? hierarchy_members_of(job->hosts, a.peers.index[p]) : 1;
    }
    const int own = job->hosts ? hierarchy_members_of(job->hosts, group->rank) : 1;
    for (int p = 0; p < a.peers.count; p++)
        a.is_weighted |= sizes[p] != own;
    if (a.is_weighted) {
        a.shares = peers_shares(op->topology, &a.peers, own, sizes);
        a.weight = 1.0 / a.shares.of;
    }
    if (a.peers.count)
        return averaging_run(&a);
    keep(list);
    return BHVD_OK;
}

// Hosts are the peers, each with the mean of its members.
static bhvd_status average_hosts(struct run *run, struct group *group, const struct span_list *list,
                                 struct work *op)
{
    const bool several = group->hierarchy != NULL;
    struct job job = {op, group->hierarchy};
    const int members = several ? group->hierarchy->local->size : group->size;
    const struct reduction mean = reduction_of(&run->kernels, KERNEL_SUM, op->tensors[0].dtype, 1.0, 1.0 / members);
    return several ? hierarchical_run(run, group, &mean, list, average_with_peers, &job)
                   : allreduce_shared(run, group, &mean, list);
}

bhvd_status d_fp_s(struct run *run, struct group *group, struct work *op, struct bhvd_error *error)
{
    struct span_list list = {0};
    struct job flat = {op, NULL};
    bhvd_status status = op->hierarchical ? primitive_check_hosts(run, group, error) : BHVD_OK;
    if (!status)
        status = primitive_spans(run, op, &list);
    if (!status && list.nbytes)
        status = primitive_has_levels(group, op->kind, op->hierarchical) ? average_hosts(run, group, &list, op)
                                                                       : average_with_peers(run, group, &list, 0, &flat, NULL);
    span_list_fini(&list);
    return status;
}
