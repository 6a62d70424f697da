// D_LP_S: decentralized, low precision, synchronous. Ranks form a ring, and each keeps replicas: the sums of what it and its
// neighbors have sent so far.
//
//     own += D(Q(v_i))      left += D(Q(v_{i-1}))      right += D(Q(v_{i+1}))
//
// All three holders of a replica decode the same bytes and add them in float32, so replicas that began equal stay bit-equal: own of
// i, right of i-1, left of i+1. The quantization error of Q is part of the next v_i if v is a difference to a replica: DCD-PSGD and
// CHOCO-SGD are this primitive plus a formula. n = 2: left and right are the same rank, whose code is sent once and added to both;
// n = 1: the rank is its own left and right.
//
// To save such a formula a pass over memory, the primitive can mix a rank's values x_i and the replicas into v_i before it updates
// them, and into a result afterwards (weights a and b; if those of replicas are 0, v_i = x_i, no result):
//
//     v_i = x_i + (a_1 own + a_2 left + a_3 right)        result = b_0 x_i + (b_1 own + b_2 left + b_3 right)
//
// The brackets are computed in float32, from left to right; the rest in the dtype's arithmetic, rounded once.
//
// v is encoded in segments (encoder.h): a few are on the wire while another is encoded or decoded (coded_schedules.h).
// Cost: |Q(N)| bytes to each neighbor: 2 |Q(N)| per rank (n = 2: |Q(N)|).
//
// If a GPU encodes v when it is posted, and decodes when this has ended (gpu/staged_codes.h), this file handles only codes.
//
// Hierarchical: the ring consists of hosts, and x_i is the mean of a host's members, who all end with the same result. Each host's
// first member, its leader, encodes and exchanges; it passes the codes that it has sent and received to the others, who decode the
// same bytes. A neighbor with fewer members gets a smaller weight in both mixes, as in peers.h: its replica R is replaced by own +
// min(1, s_p / s_i) (R - own), if own is kept. So a formula that keeps the mean of equal hosts keeps the mean over all ranks.
// Cost: as above per host; within hosts N elements for the mean and 3 |Q(N)| bytes to every member.
#include <string.h>

#include "collective/pipelines.h"
#include "executor/hierarchy.h"
#include "executor/two_level.h"
#include "primitive/coded.h"
#include "primitive/peers.h"

enum { PIECES = 32 };       // segments in flight per host, at most: enough for a link with high latency

struct d_lp_s {
    struct executor *exec;
    const struct collective *coll;
    struct encoder encoder;
    struct codes codes;
    struct span_list list, results;     // of values and of results: the operation's; or values are a part of its vector ...
    size_t begin;                       // ... from this element on
    struct peers peers;
    double before[1 + REPLICAS], after[1 + REPLICAS];   // the operation's weights, adjusted for the sizes of hosts
};

// Scratch memory of one step: a segment in the dtype, in float32, and as doubles.
struct scratch {
    unsigned char *result;
    float *mixed;
    void *term;
};

static bool make_scratch(struct d_lp_s *x, struct scratch *scratch)
{
    const size_t longest = segments_part(&x->codes.cut, 0, 0).count;
    const size_t values = size_round_up(longest * x->encoder.element, CACHE_LINE);
    const size_t floats = size_round_up(longest * sizeof(float), CACHE_LINE);
    unsigned char *memory = coded_scratch(x->exec, &x->encoder, &x->codes, values + 3 * floats);
    if (memory)
        *scratch = (struct scratch){memory, (float *)(void *)(memory + values), memory + values + floats};
    return memory;
}

// dst = weights[0] values + the other weights times the replicas, for the elements from `begin` on.
static void mix(const struct d_lp_s *x, const struct scratch *scratch, void *dst, const void *values, const double *weights,
                size_t begin, size_t count)
{
    const struct kernel_table *kernels = &x->exec->kernels;
    const bhvd_dtype dtype = x->encoder.dtype;
    bool is_first = true;
    for (int r = 0; r < REPLICAS; r++) {
        if (weights[1 + r] == 0)
            continue;
        const float *replica = x->coll->replicas[r] + begin;
        kernels->scale[BHVD_FLOAT32](is_first ? scratch->mixed : scratch->term, replica, weights[1 + r], count);
        if (!is_first)
            kernels->reduce[KERNEL_SUM][BHVD_FLOAT32](scratch->mixed, scratch->mixed, scratch->term, count);
        is_first = false;
    }
    if (weights[0] == 0) {
        kernels->from_float[dtype](dst, scratch->mixed, count);
    } else if (dtype == BHVD_FLOAT64) {
        kernels->from_float[dtype](scratch->term, scratch->mixed, count);
        kernels->scale[dtype](dst, values, weights[0], count);
        kernels->reduce[KERNEL_SUM][dtype](dst, dst, scratch->term, count);
    } else {
        kernels->to_float[dtype](scratch->term, values, count);
        kernels->scale[BHVD_FLOAT32](scratch->term, scratch->term, weights[0], count);
        kernels->reduce[KERNEL_SUM][BHVD_FLOAT32](scratch->mixed, scratch->term, scratch->mixed, count);
        kernels->from_float[dtype](dst, scratch->mixed, count);
    }
}

// Offset of values in the operation's vector, in elements.
static size_t element_of(const struct d_lp_s *x, const struct byte_range *values)
{
    return x->begin + values->begin / x->encoder.element;
}

static void encode(struct d_lp_s *x, const struct scratch *scratch, const struct byte_range *values, unsigned char *code)
{
    const size_t begin = element_of(x, values), count = values->nbytes / x->encoder.element;
    const void *value = span_source(&x->list, values->begin, values->nbytes, x->encoder.value);
    if (x->coll->mixes_before) {
        mix(x, scratch, x->encoder.value, value, x->before, begin, count);
        value = x->encoder.value;
    }
    encoder_encode(&x->encoder, code, value, count, NULL, ENCODER_VALUES, begin);
}

static void store_result(const struct d_lp_s *x, const struct scratch *scratch, const struct byte_range *values)
{
    const size_t begin = element_of(x, values), offset = begin * x->encoder.element;
    void *to = span_target(&x->results, offset, values->nbytes, scratch->result);
    mix(x, scratch, to, span_source(&x->list, values->begin, values->nbytes, x->encoder.value), x->after, begin,
        values->nbytes / x->encoder.element);
    span_store(&x->results, offset, values->nbytes, to);
}

// replicas += D(codes); peers NULL: there are none.
static void combine(struct d_lp_s *x, const struct byte_range *values, const unsigned char *own, const unsigned char *peers)
{
    const size_t begin = element_of(x, values), count = values->nbytes / x->encoder.element;
    const unsigned char *last = peers + (x->peers.count ? (size_t)(x->peers.count - 1) * x->codes.received.each : 0);
    const unsigned char *codes[REPLICAS] = {own, x->peers.count ? peers : own, x->peers.count ? last : own};
    struct scratch scratch;
    if (!make_scratch(x, &scratch))
        return;
    for (int r = 0; r < REPLICAS; r++)
        if (x->coll->replicas[r])
            x->encoder.codec->decode_add(x->coll->replicas[r] + begin, codes[r], count, &x->encoder.options);
    if (x->coll->mixes_after)
        store_result(x, &scratch, values);
    executor_release(x->exec, scratch.result);
}

static void run_custom_step(void *arg, const struct step *step, unsigned char *const *buffers)
{
    struct d_lp_s *x = arg;
    struct scratch scratch;
    if (step->kind == STEP_COMBINE) {
        combine(x, &step->values, location_pointer(buffers, step->other), location_pointer(buffers, step->from));
    } else if (make_scratch(x, &scratch)) {
        encode(x, &scratch, &step->values, location_pointer(buffers, step->to));
        executor_release(x->exec, scratch.result);
    }
}

// For a ring of n in which this rank or its host is number `me`. The caller sets the lists.
static struct d_lp_s d_lp_s_of(struct executor *exec, const struct collective *coll, int n, int me)
{
    struct d_lp_s x = {
        .exec = exec,
        .coll = coll,
        .encoder = encoder_init(&exec->kernels, coll, me),
        .codes = coded_of(coll, collective_nbytes(coll), 1),
        .peers = peers_of(BHVD_TOPOLOGY_RING, n, me, 0),
    };
    memcpy(x.before, coll->before, sizeof x.before);
    memcpy(x.after, coll->after, sizeof x.after);
    return x;
}

// Takes ownership of the list.
static bhvd_status plan_among(struct executor *exec, const struct group *group, const struct collective *coll,
                              const struct gpu_codes *gpu, struct span_list *list, struct plan *plan)
{
    struct d_lp_s *x = primitive_create(exec, sizeof *x, list, plan);
    if (!x)
        return exec->failure.status;
    *x = d_lp_s_of(exec, coll, group->size, group->rank);
    x->list = x->results = plan->list;
    plan->operands = (struct operands){.run_custom_step = run_custom_step, .arg = x,
                                       .exclusive_memory = collective_exclusive_memory(coll)};
    coded_plan(plan, &x->codes, 1, (size_t)x->peers.count, &exec->network, gpu);
    schedule_exchange(plan_begin(plan, group), &x->codes, x->peers.index, x->peers.count);
    return BHVD_OK;
}

// ------------------------------------------------------------------------------------------------------------ of hosts

// Adjusts the weights between hosts of different sizes: a smaller host's replica gets less weight, the own one more.
static void weigh(const struct hierarchy *h, const struct peers *peers, double *weights)
{
    const double own = hierarchy_members_of(h, h->host);
    for (int side = 0; side < 2 && peers->count; side++) {
        const int neighbor = peers->index[side ? peers->count - 1 : 0];
        const double share = hierarchy_members_of(h, neighbor) / own;
        if (share < 1) {
            weights[1] += (1 - share) * weights[2 + side];
            weights[2 + side] *= share;
        }
    }
}

// A segment, from when the host's mean of it is made until all members have combined its codes. codes: the own one, then those of
// the peers, which the leader makes and receives.
struct ring_piece {
    struct d_lp_s x;
    struct span mean;
    unsigned char *codes;
};

// A two-level task (executor/two_level.h).
struct host_ring {
    struct two_level two_level;
    struct d_lp_s all;
    const struct group *group;
    int leaders[PEERS_MAX];             // of the peers: positions in the group
    struct reduction mean;
    struct span_list list;              // of the piece in reduction, from values to their mean
    size_t code_nbytes;                 // bytes of a code, at most
    struct allreduce_pipeline reducing;
    struct broadcast_pipeline distributing;
    struct ring_piece pieces[PIECES];
};

static struct ring_piece *piece_at(struct host_ring *ring, size_t number) { return &ring->pieces[number % ring->two_level.depth]; }

static struct pipeline *reduce(struct executor *exec, struct two_level *l, size_t number)
{
    struct host_ring *ring = (struct host_ring *)l;
    struct ring_piece *piece = piece_at(ring, number);
    const size_t element = ring->all.codes.element;
    const struct segment_part part = segments_part(&ring->all.codes.cut, 0, number);
    struct span_cursor cursor = span_cursor_at(&ring->all.list, part.begin * element);
    unsigned char *mean = piece->mean.dst;
    piece->x = ring->all;
    piece->x.begin = part.begin;
    piece->x.codes.cut = (struct segments){part.count, 1, ENCODER_SEGMENT};
    piece->mean.nbytes = part.count * element;
    piece->x.list = (struct span_list){&piece->mean, 1, 1, piece->mean.nbytes};
    span_list_cut(&ring->list, &cursor, piece->mean.nbytes);
    for (size_t i = 0; i < ring->list.count; mean += ring->list.spans[i++].nbytes)
        ring->list.spans[i].dst = mean;
    allreduce_begin(&ring->reducing, exec, l->local, l->slot, &ring->mean, &ring->list);
    return &ring->reducing.pipeline;
}

static bhvd_status inter_exchange(struct executor *exec, struct two_level *l, size_t number, struct plan *plan)
{
    struct host_ring *ring = (struct host_ring *)l;
    struct ring_piece *piece = piece_at(ring, number);
    (void)exec;
    if (l->local->rank)
        return BHVD_OK;
    schedule_exchange(plan_begin(plan, ring->group), &piece->x.codes, ring->leaders, piece->x.peers.count);
    plan->operands = (struct operands){.output = piece->codes, .run_custom_step = run_custom_step, .arg = &piece->x};
    return BHVD_OK;
}

// The leader's codes are sent to the other members ...
static struct pipeline *distribute(struct executor *exec, struct two_level *l, size_t number)
{
    struct host_ring *ring = (struct host_ring *)l;
    unsigned char *codes = piece_at(ring, number)->codes;
    const size_t nbytes = (size_t)(1 + ring->all.peers.count) * ring->code_nbytes;
    broadcast_begin(&ring->distributing, exec, l->local, l->slot, 0, codes, codes, nbytes);
    return &ring->distributing.pipeline;
}

// ... and all members combine them.
static void end(struct executor *exec, struct two_level *l, size_t number)
{
    struct host_ring *ring = (struct host_ring *)l;
    struct ring_piece *piece = piece_at(ring, number);
    (void)exec;
    combine(&piece->x, &(struct byte_range){0, piece->mean.nbytes}, piece->codes, piece->codes + ring->code_nbytes);
}

static const struct two_level_ops OPS = {.reduce = reduce, .inter_exchange = inter_exchange, .distribute = distribute, .end = end};

// Allocates memory for means and codes. False: out of memory.
static bool lay_out(struct executor *exec, struct host_ring *ring)
{
    struct two_level *l = &ring->two_level;
    struct codes *codes = &ring->all.codes;
    const size_t longest = segments_part(&codes->cut, 0, 0).count, spans = l->list.count;
    const size_t mean = size_round_up(longest * codes->element, CACHE_LINE);
    ring->code_nbytes = encoder_stride(&ring->all.encoder, longest);
    codes->encodes = true;
    codes->decodes = false;
    codes->slots = 1;
    codes->own = (struct code_lay){OUTPUT_BUFFER, 0, 0, 0, false};
    codes->results = (struct code_lay){OUTPUT_BUFFER, ring->code_nbytes, ring->code_nbytes, 0, false};
    codes->received.each = ring->code_nbytes;
    const size_t stride = mean + (size_t)(1 + ring->all.peers.count) * ring->code_nbytes;
    if (!(l->memory = executor_acquire(exec, l->depth * stride + spans * sizeof(struct span))))
        return false;
    unsigned char *at = l->memory;
    for (size_t i = 0; i < l->depth; i++, at += stride) {
        ring->pieces[i].mean = (struct span){at, at, 0};
        ring->pieces[i].codes = at + mean;
    }
    ring->list = (struct span_list){.spans = (struct span *)(void *)at, .capacity = spans};
    return true;
}

// Takes ownership of the list.
static bhvd_status plan_hosts(struct executor *exec, struct group *group, const struct collective *coll, struct span_list *list,
                              struct plan *plan)
{
    const struct hierarchy *h = group->hierarchy;       // NULL: one host
    struct group *local = h ? h->local : group;
    struct d_lp_s x = d_lp_s_of(exec, coll, h ? h->hosts : 1, h ? h->host : 0);
    struct host_ring *ring = two_level_create(exec, sizeof *ring, &OPS, local, list->nbytes,
                                              segments_in_chunk(&x.codes.cut), PIECES);
    if (!ring)
        return exec->failure.status;
    if (h && coll->replicas[0]) {
        weigh(h, &x.peers, x.before);
        weigh(h, &x.peers, x.after);
    }
    for (int p = 0; p < x.peers.count; p++)
        ring->leaders[p] = hierarchy_member(h, x.peers.index[p], 0);
    x.list = x.results = ring->two_level.list = *list;
    *list = (struct span_list){0};
    ring->all = x;
    ring->group = group;
    ring->mean = reduction_of(&exec->kernels, KERNEL_SUM, x.encoder.dtype, 1.0, 1.0 / local->size);
    ring->two_level.task.exclusive_memory = collective_exclusive_memory(coll);
    return two_level_plan(exec, &ring->two_level, lay_out(exec, ring), plan);
}

// --------------------------------------------------------------------------------------------------------------------

bhvd_status d_lp_s(struct executor *exec, struct group *group, struct collective *coll, const struct gpu_codes *gpu,
                   struct plan *plan, struct bhvd_error *error)
{
    struct span_list list = {0};
    bhvd_status status = coll->hierarchical ? primitive_check_hosts(exec, group, error) : BHVD_OK;
    if (!status)
        status = primitive_spans(exec, coll, &list);
    if (!status && list.nbytes && primitive_is_hierarchical(group, coll->kind, coll->hierarchical)) {
        status = plan_hosts(exec, group, coll, &list, plan);
    } else if (!status && list.nbytes) {
        status = plan_among(exec, group, coll, gpu, &list, plan);
    }
    span_list_fini(&list);
    return status;
}
