// D_LP_S: decentralized, low precision, synchronous. Ranks stand in a ring, and each keeps replicas of what it and its
// neighbours have sent so far:
//
//     own += D(Q(v_i))      left += D(Q(v_{i-1}))      right += D(Q(v_{i+1}))
//
// All three holders of a replica decode the same bytes and add them in float32, so replicas that began equal stay
// bit-equal: own of i, right of i-1, left of i+1. What Q loses is in v_i next time, when v is a difference to a replica:
// DCD-PSGD and CHOCO-SGD are this primitive and a formula. n = 2: left and right are the same rank, whose code is sent
// once and added to both; n = 1: the rank is its own left and right.
//
// So that such a formula needs no pass of its own over memory, v_i may be mixed of a rank's values x_i and the replicas before
// they are added to, and a result of them afterwards (weights a and b; where those of replicas are 0, v_i = x_i, no result):
//
//     v_i = x_i + (a_1 own + a_2 left + a_3 right)        result = b_0 x_i + (b_1 own + b_2 left + b_3 right)
//
// In brackets in float32, from left to right; the rest in the dtype's arithmetic, rounded once.
//
// v is encoded in segments (encoder.h): a few are on the wire while another is encoded or decoded.
// Wire: |Q(N)| bytes to each neighbour: 2 |Q(N)| per rank (n = 2: |Q(N)|).
//
// On a GPU that has encoded v when it was posted, and adds when this has ended (gpu/staged_codes.h), codes are all there is here.
//
// Hierarchical: the ring is of hosts, and x_i of v_i the mean of a host's members; of results a member's own. Each host's
// first member, its leader, encodes and exchanges; what it has sent and received it passes on to the others, who decode the
// same bytes. A neighbour of fewer members counts for its share in both mixes, as in peers.h: in place of its replica R stands
// own + min(1, s_p / s_i) (R - own), if own is kept. So what keeps the mean of equal hosts keeps the mean over all ranks.
// Wire: as above per host; within hosts N elements for the mean and 3 |Q(N)| bytes to every member.
#include "primitive/primitive.h"

#include <string.h>

#include "primitive/encoder.h"
#include "primitive/peers.h"
#include "run/hierarchy.h"

enum { WINDOW = 3 };            // segments in flight

struct slot {
    unsigned char *codes;       // 1 + peers of them: the own one, then one of each peer
    struct transfer transfers[2 * PEERS_MAX];
};

struct exchange {
    struct run *run;
    const struct work *op;
    const struct span_list *list, *results;
    const struct ready_codes *ready;    // NULL: values are encoded, and replicas added to, here
    struct encoder encoder;
    struct peers peers;
    struct link *links[PEERS_MAX];
    struct group *local;  // this rank's host, when hosts are the ring; else NULL
    double before[1 + REPLICAS], after[1 + REPLICAS];   // the operation's, hosts counted for their ranks
    size_t count, stride;       // stride: from one code of a slot to the next
    unsigned char *result;      // scratch: one segment in the dtype,
    float *mixed;               // in float32,
    void *term;                 // and as doubles
    struct slot slots[WINDOW];
};

static size_t segment_count(const struct exchange *x, size_t s)
{
    size_t left = x->count - s * ENCODER_SEGMENT;
    return left < ENCODER_SEGMENT ? left : ENCODER_SEGMENT;
}

// The code of segment s: index 0 the own one, 1 + p that of peer p.
static unsigned char *code_at(const struct exchange *x, int index, size_t s)
{
    if (x->ready)
        return x->ready->own + (size_t)index * x->ready->code_stride + s * x->ready->segment_stride;
    return x->slots[s % WINDOW].codes + (size_t)index * x->stride;
}

// dst = weights[0] values + the others times the replicas, of segment s.
static void mix(const struct exchange *x, void *dst, const void *values, const double *weights, size_t s)
{
    const struct kernel_table *kernels = &x->run->kernels;
    const bhvd_dtype dtype = x->encoder.dtype;
    const size_t count = segment_count(x, s);
    bool is_first = true;
    for (int r = 0; r < REPLICAS; r++) {
        if (weights[1 + r] == 0)
            continue;
        const float *replica = x->op->replicas[r] + s * ENCODER_SEGMENT;
        kernels->scale[BHVD_FLOAT32](is_first ? x->mixed : x->term, replica, weights[1 + r], count);
        if (!is_first)
            kernels->reduce[KERNEL_SUM][BHVD_FLOAT32](x->mixed, x->mixed, x->term, count);
        is_first = false;
    }
    if (weights[0] == 0) {
        kernels->from_float[dtype](dst, x->mixed, count);
    } else if (dtype == BHVD_FLOAT64) {
        kernels->from_float[dtype](x->term, x->mixed, count);
        kernels->scale[dtype](dst, values, weights[0], count);
        kernels->reduce[KERNEL_SUM][dtype](dst, dst, x->term, count);
    } else {
        kernels->to_float[dtype](x->term, values, count);
        kernels->scale[BHVD_FLOAT32](x->term, x->term, weights[0], count);
        kernels->reduce[KERNEL_SUM][BHVD_FLOAT32](x->mixed, x->term, x->mixed, count);
        kernels->from_float[dtype](dst, x->mixed, count);
    }
}

static void store_result(const struct exchange *x, size_t s)
{
    const size_t offset = s * ENCODER_SEGMENT * x->encoder.element, nbytes = segment_count(x, s) * x->encoder.element;
    void *to = span_target(x->results, offset, nbytes, x->result);
    mix(x, to, span_source(x->results, offset, nbytes, x->encoder.value), x->after, s);
    span_store(x->results, offset, nbytes, to);
}

static void encode(const struct exchange *x, size_t s)
{
    const size_t count = segment_count(x, s), begin = s * ENCODER_SEGMENT, element = x->encoder.element;
    const void *value = span_source(x->list, begin * element, count * element, x->encoder.value);
    if (x->op->mixes_before) {
        mix(x, x->encoder.value, value, x->before, s);
        value = x->encoder.value;
    }
    encoder_encode(&x->encoder, code_at(x, 0, s), value, count, NULL, ENCODER_VALUES, begin);
}

static void send(struct exchange *x, size_t s)
{
    struct slot *slot = &x->slots[s % WINDOW];
    const size_t nbytes = encoder_size(&x->encoder, segment_count(x, s));
    if (!x->ready)
        encode(x, s);
    for (int p = 0; p < x->peers.count; p++) {
        link_post_send(x->links[p], x->run->connections.started, &slot->transfers[2 * p], code_at(x, 0, s), nbytes);
        link_post_recv(x->links[p], x->run->connections.started, &slot->transfers[2 * p + 1], code_at(x, 1 + p, s), nbytes);
    }
    run_look(x->run);
}

static bool is_leader(const struct exchange *x) { return !x->local || x->local->rank == 0; }

// replica += D(code number `index` of the segment)
static void add(const struct exchange *x, float *replica, int index, size_t s)
{
    if (replica)
        x->encoder.codec->decode_add(replica + s * ENCODER_SEGMENT, code_at(x, index, s), segment_count(x, s),
                                     &x->encoder.options);
}

static bhvd_status receive(struct exchange *x, size_t s)
{
    struct slot *slot = &x->slots[s % WINDOW];
    bhvd_status status = BHVD_OK;
    if (is_leader(x))
        status = run_transfers(x->run, slot->transfers, 2 * x->peers.count);
    if (!status && x->local)
        status = broadcast_shared(x->run, x->local, 0, slot->codes, slot->codes, (size_t)(1 + x->peers.count) * x->stride);
    if (!status && !x->ready) {
        add(x, x->op->replicas[0], 0, s);
        add(x, x->op->replicas[1], x->peers.count ? 1 : 0, s);
        add(x, x->op->replicas[2], x->peers.count, s);
        if (x->op->mixes_after)
            store_result(x, s);
    }
    return status;
}

// Scratch memory for codes, and for encoding them.
static bhvd_status slots_init(struct exchange *x)
{
    const size_t longest = segment_count(x, 0);
    x->stride = encoder_stride(&x->encoder, longest);
    const size_t slot_size = (size_t)(1 + x->peers.count) * x->stride;
    const size_t values = encoder_align(longest * x->encoder.element), floats = encoder_align(longest * sizeof(float));
    unsigned char *scratch = fusion_acquire(
        x->run, 1, WINDOW * slot_size + values + 3 * floats + encoder_scratch_size(&x->encoder, longest));
    if (!scratch)
        return run_fail(x->run, BHVD_ERR_SYSTEM, "no memory for codes of %zu elements", longest);
    for (int i = 0; i < WINDOW; i++, scratch += slot_size)
        x->slots[i].codes = scratch;
    x->result = scratch;
    x->mixed = (float *)(x->result + values);
    x->term = (unsigned char *)x->mixed + floats;
    encoder_set_scratch(&x->encoder, (unsigned char *)x->term + 2 * floats, longest);
    return BHVD_OK;
}

static bhvd_status exchange_run(struct exchange *x)
{
    const size_t segments = (x->count + ENCODER_SEGMENT - 1) / ENCODER_SEGMENT;
    bhvd_status status = x->ready ? BHVD_OK : slots_init(x);
    for (size_t s = 0; s < segments + WINDOW - 1 && !status; s++) {
        if (s < segments && is_leader(x))
            send(x, s);
        if (s >= WINDOW - 1)
            status = receive(x, s - (WINDOW - 1));
    }
    return status;
}

// The mean of the host's members, in scratch memory, takes the place of the values.
static bhvd_status mean_of_host(struct exchange *x, struct span_list *list, struct span *mean)
{
    void *vector = fusion_acquire(x->run, 0, list->nbytes);
    if (!vector)
        return run_fail(x->run, BHVD_ERR_SYSTEM, "no memory for a fusion buffer of %zu bytes", list->nbytes);
    size_t at = 0;
    for (size_t i = 0; i < list->count; at += list->spans[i++].nbytes)
        list->spans[i].dst = (unsigned char *)vector + at;
    const struct reduction reduction = reduction_of(&x->run->kernels, KERNEL_SUM, x->encoder.dtype, 1.0, 1.0 / x->local->size);
    *mean = (struct span){vector, vector, list->nbytes};
    return allreduce_shared(x->run, x->local, &reduction, list);
}

// Weights of mixes, as they are between these hosts: what a smaller neighbour's replica loses is the own one's.
static void weigh(const struct hierarchy *h, const struct peers *peers, double *weights)
{
    const double own = hierarchy_members_of(h, h->host);
    for (int side = 0; side < 2 && peers->count; side++) {
        const int neighbour = peers->index[side ? peers->count - 1 : 0];
        const double share = hierarchy_members_of(h, neighbour) / own;
        if (share < 1) {
            weights[1] += (1 - share) * weights[2 + side];
            weights[2 + side] *= share;
        }
    }
}

static bhvd_status run_ring(struct run *run, struct group *group, struct span_list *list, const struct span_list *results,
                            const struct work *op, const struct ready_codes *ready)
{
    const bool levels = primitive_has_levels(group, op->kind, op->hierarchical);
    const struct hierarchy *h = levels ? group->hierarchy : NULL;
    const int n = h ? h->hosts : levels ? 1 : group->size, me = h ? h->host : levels ? 0 : group->rank;
    struct span mean;
    struct span_list means = {&mean, 1, 1, list->nbytes};
    struct exchange x = {
        .run = run,
        .op = op,
        .list = levels ? &means : list,
        .results = results,
        .ready = ready,
        .encoder = encoder_init(&run->kernels, op, me),
        .peers = peers_of(BHVD_TOPOLOGY_RING, n, me, 0),
        .local = h ? h->local : levels ? group : NULL,
        .count = list->nbytes / bhvd_dtype_size(op->tensors[0].dtype),
    };
    memcpy(x.before, op->before, sizeof x.before);
    memcpy(x.after, op->after, sizeof x.after);
    if (h && op->replicas[0]) {
        weigh(h, &x.peers, x.before);
        weigh(h, &x.peers, x.after);
    }
    for (int p = 0; p < x.peers.count; p++)
        x.links[p] = group_link(run, group, h ? hierarchy_member(h, x.peers.index[p], 0) : x.peers.index[p]);
    bhvd_status status = x.local ? mean_of_host(&x, list, &mean) : BHVD_OK;
    return status ? status : exchange_run(&x);
}

bhvd_status d_lp_s(struct run *run, struct group *group, struct work *op, const struct ready_codes *codes,
                   struct bhvd_error *error)
{
    struct span_list list = {0}, results = {0};         // the first may be given other places for results
    bhvd_status status = op->hierarchical ? primitive_check_hosts(run, group, error) : BHVD_OK;
    for (size_t t = 0; t < op->tensor_count && !status; t++) {
        if (!span_list_add(&list, &op->tensors[t]) || !span_list_add(&results, &op->tensors[t]))
            status = run_fail(run, BHVD_ERR_SYSTEM, "no memory for an operation of %zu tensors", op->tensor_count);
    }
    if (!status && list.nbytes)
        status = run_ring(run, group, &list, &results, op, codes);
    span_list_fini(&list);
    span_list_fini(&results);
    return status;
}
