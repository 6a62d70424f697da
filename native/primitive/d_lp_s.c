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
// v is encoded in segments (encoder.h): a few are on the wire while another is encoded or decoded (coded.h).
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

#include "collective/collectives.h"
#include "executor/group.h"
#include "primitive/coded.h"

enum { PIECES = 32 };       // segments in flight per host, at most: enough for a link with high latency

struct d_lp_s {
    struct executor *exec;
    const struct collective *coll;
    struct encoder encoder;
    struct codes codes;
    struct span_list list, results;     // of values and of results: the operation's; or values are a part of its vector ...
    size_t begin;                       // ... from this element on
    double before[1 + REPLICAS], after[1 + REPLICAS];   // the operation's weights, adjusted for the sizes of hosts
};

// dst = weights[0] values + the other weights times the replicas, for the elements from `begin` on.
static void mix(const struct d_lp_s *x, const struct coded_scratch *scratch, void *dst, const void *values, const double *weights,
                size_t begin, size_t count)
{
    const struct kernel_table *kernels = &x->exec->kernels;
    const bhvd_dtype dtype = x->encoder.dtype;
    float *term = scratch->floats, *mixed = term + 2 * count;       // a term may be in double
    bool is_first = true;
    for (int r = 0; r < REPLICAS; r++) {
        if (weights[1 + r] == 0)
            continue;
        const float *replica = x->coll->args.replicas[r] + begin;
        kernels->scale[BHVD_FLOAT32](is_first ? mixed : term, replica, weights[1 + r], count);
        if (!is_first)
            kernels->reduce[KERNEL_SUM][BHVD_FLOAT32](mixed, mixed, term, count);
        is_first = false;
    }
    if (weights[0] == 0) {
        kernels->from_float[dtype](dst, mixed, count);
    } else if (dtype == BHVD_FLOAT64) {
        kernels->from_float[dtype](term, mixed, count);
        kernels->scale[dtype](dst, values, weights[0], count);
        kernels->reduce[KERNEL_SUM][dtype](dst, dst, term, count);
    } else {
        kernels->to_float[dtype](term, values, count);
        kernels->scale[BHVD_FLOAT32](term, term, weights[0], count);
        kernels->reduce[KERNEL_SUM][BHVD_FLOAT32](mixed, term, mixed, count);
        kernels->from_float[dtype](dst, mixed, count);
    }
}

// Offset of values in the operation's vector, in elements.
static size_t element_of(const struct d_lp_s *x, const struct byte_range *values)
{
    return x->begin + values->begin / x->encoder.element;
}

static void encode(const struct d_lp_s *x, const struct coded_scratch *scratch, const struct byte_range *values,
                   unsigned char *code)
{
    const size_t begin = element_of(x, values), count = values->nbytes / x->encoder.element;
    const void *value = span_source(&x->list, values->begin, values->nbytes, x->encoder.value);
    if (collective_mixes(x->before + 1)) {
        mix(x, scratch, x->encoder.value, value, x->before, begin, count);
        value = x->encoder.value;
    }
    encoder_encode(&x->encoder, code, value, count, NULL, ENCODER_VALUES, begin);
}

static void store_result(const struct d_lp_s *x, const struct coded_scratch *scratch, const struct byte_range *values)
{
    const size_t begin = element_of(x, values), offset = begin * x->encoder.element;
    void *to = span_target(&x->results, offset, values->nbytes, scratch->values);
    mix(x, scratch, to, span_source(&x->list, values->begin, values->nbytes, x->encoder.value), x->after, begin,
        values->nbytes / x->encoder.element);
    span_store(&x->results, offset, values->nbytes, to);
}

// replicas += D(codes)
static void combine(const struct d_lp_s *x, const struct coded_scratch *scratch, const struct byte_range *values,
                    const unsigned char *own, const unsigned char *peers)
{
    const size_t begin = element_of(x, values), count = values->nbytes / x->encoder.element;
    const unsigned char *last = peers + (x->codes.peers.count ? (size_t)(x->codes.peers.count - 1) * x->codes.received.each : 0);
    const unsigned char *codes[REPLICAS] = {own, x->codes.peers.count ? peers : own, x->codes.peers.count ? last : own};
    for (int r = 0; r < REPLICAS; r++)
        if (x->coll->args.replicas[r])
            x->encoder.codec->decode_add(x->coll->args.replicas[r] + begin, codes[r], count, &x->encoder.options);
    if (collective_mixes(x->after + 1))
        store_result(x, scratch, values);
}

static void run_custom_step(void *arg, const struct step *step, unsigned char *const *buffers)
{
    struct d_lp_s *x = arg;
    const size_t longest = segments_part(&x->codes.cut, 0, 0).count;
    const struct coded_scratch scratch = coded_acquire(x->exec, &x->encoder, &x->codes, 3 * longest);
    if (!scratch.values)
        return;
    if (step->kind == STEP_COMBINE)
        combine(x, &scratch, &step->values, location_pointer(buffers, step->other), location_pointer(buffers, step->from));
    else
        encode(x, &scratch, &step->values, location_pointer(buffers, step->to));
    executor_release(x->exec, scratch.values);
}

// For a ring of n in which this rank or its host is number `me`. The caller sets the lists.
static struct d_lp_s d_lp_s_of(struct executor *exec, const struct collective *coll, int n, int me)
{
    struct d_lp_s x = {
        .exec = exec,
        .coll = coll,
        .encoder = encoder_init(&exec->kernels, coll, me),
        .codes = coded_of(coll, collective_nbytes(coll), n, me, &exec->network),
    };
    x.before[0] = 1;
    memcpy(x.before + 1, coll->args.before, sizeof coll->args.before);
    memcpy(x.after, coll->args.after, sizeof x.after);
    return x;
}

static bhvd_status plan_among(struct executor *exec, struct group *group, const struct collective *coll,
                              const struct gpu_codes *gpu, struct span_list *list, struct plan *plan)
{
    struct d_lp_s *x = primitive_create(exec, sizeof *x, coll, run_custom_step, list, plan);
    if (!x)
        return exec->failure.status;
    *x = d_lp_s_of(exec, coll, group->size, group->rank);
    x->list = x->results = plan->list;
    if (gpu)
        coded_on_gpu(&x->codes, gpu, &plan->operands);
    coded_schedule(plan_begin(plan, group), &x->codes);
    return BHVD_OK;
}

// ------------------------------------------------------------------------------------------------------------ hierarchical

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

// A piece is a segment, from when the host's mean of it is made until all members have combined its codes. Pieces in flight have
// their place in the scratch memory: the mean, the leader's code, and those of the peers, which the leader receives.
struct host_ring {
    struct d_lp_s all;
    struct group *local;
    struct reduction mean;
    size_t mean_nbytes;                 // in a place
    struct span_list piece;             // the piece being reduced, from values to their mean
    struct allreduce_pipeline reducing;
    struct exchange_pipeline distributing;
};

static struct segment_part part_of(const struct host_ring *ring, size_t piece)
{
    return segments_part(&ring->all.codes.cut, 0, piece);
}

static size_t place_of(const struct host_ring *ring, size_t piece)
{
    return piece % PIECES * (ring->mean_nbytes + ring->all.codes.own.segment);
}

static struct location codes_of(const struct host_ring *ring, size_t piece)
{
    return in_buffer(SCRATCH_BUFFER, place_of(ring, piece) + ring->mean_nbytes);
}

// The leader's codes are distributed, and all members combine them.
static struct pipeline *begin_pipeline(void *arg, struct executor *exec, int slot, const struct step *step,
                                       unsigned char *const *buffers)
{
    struct host_ring *ring = arg;
    unsigned char *place = location_pointer(buffers, step->to);
    if (step->kind == STEP_DISTRIBUTE_WITHIN) {
        broadcast_begin(&ring->distributing, exec, ring->local, slot, 0, place, place, step->nbytes);
        return &ring->distributing.pipeline;
    }
    struct span_cursor cursor = span_cursor_at(&ring->all.list, step->values.begin);
    span_list_cut(&ring->piece, &cursor, step->values.nbytes);
    for (size_t i = 0; i < ring->piece.count; place += ring->piece.spans[i++].nbytes)
        ring->piece.spans[i].dst = place;
    allreduce_begin(&ring->reducing, exec, ring->local, slot, &ring->mean, &ring->piece);
    return &ring->reducing.pipeline;
}

static void run_ring_step(void *arg, const struct step *step, unsigned char *const *buffers)
{
    const struct host_ring *ring = arg;
    const struct segment_part part = part_of(ring, (size_t)step->number);
    unsigned char *place = buffers[SCRATCH_BUFFER] + place_of(ring, (size_t)step->number);
    struct span mean = {place, place, part.count * ring->all.codes.element};
    struct d_lp_s x = ring->all;
    x.begin = part.begin;
    x.codes.cut = (struct segments){part.count, 1, ENCODER_SEGMENT};
    x.list = (struct span_list){&mean, 1, 1, mean.nbytes};
    run_custom_step(&x, step, buffers);
}

// Returns the step after which the codes may be distributed.
static int begin_piece(const void *arg, struct schedule *schedule, size_t piece, int after)
{
    const struct host_ring *ring = arg;
    const struct d_lp_s *all = &ring->all;
    const struct segment_part part = part_of(ring, piece);
    const struct location place = in_buffer(SCRATCH_BUFFER, place_of(ring, piece));
    const struct byte_range values = {part.begin * all->codes.element, part.count * all->codes.element};
    const int reduced = schedule_reduce_within(schedule, (int)piece, place, values.nbytes, values, after);
    struct codes codes = all->codes;
    if (ring->local->rank)
        return reduced;
    codes.cut = (struct segments){part.count, 1, ENCODER_SEGMENT};
    codes.decodes = false;
    codes.results = codes.received;
    const struct schedule_part exchange = {(int)piece, reduced, {[SCRATCH_BUFFER] = codes_of(ring, piece)}};
    schedule_begin_part(schedule, &exchange);
    coded_schedule(schedule, &codes);
    return schedule_end_part(schedule);
}

static int end_piece(const void *arg, struct schedule *schedule, size_t piece, int exchanged)
{
    const struct host_ring *ring = arg;
    const struct codes *all = &ring->all.codes;
    const size_t nbytes = all->own.segment;
    const struct location codes = codes_of(ring, piece);
    const struct byte_range values = {0, part_of(ring, piece).count * all->element};
    const int distributed = schedule_distribute_within(schedule, (int)piece, codes, nbytes, (struct byte_range){0, nbytes},
                                                       exchanged);
    const struct schedule_part combination = {(int)piece, distributed, {[SCRATCH_BUFFER] = codes}};
    schedule_begin_part(schedule, &combination);
    const struct location own = in_buffer(SCRATCH_BUFFER, 0), theirs = in_buffer(SCRATCH_BUFFER, all->received.at);
    schedule_combine(schedule, theirs, own, all->received.each, values, STEP_NONE);
    return schedule_end_part(schedule);
}

static bhvd_status plan_hosts(struct executor *exec, struct group *group, const struct collective *coll,
                              const struct gpu_codes *gpu, struct span_list *list, struct plan *plan)
{
    (void)gpu;
    const struct hierarchy *h = group->hierarchy;       // NULL: one host
    const size_t spans = list->count;
    struct host_ring *ring = primitive_create(exec, sizeof *ring + spans * sizeof(struct span), coll, run_ring_step, list, plan);
    if (!ring)
        return exec->failure.status;
    struct d_lp_s x = d_lp_s_of(exec, coll, h ? h->hosts : 1, h ? h->host : 0);
    const size_t longest = segments_part(&x.codes.cut, 0, 0).count;
    if (h && coll->args.replicas[0]) {
        weigh(h, &x.codes.peers, x.before);
        weigh(h, &x.codes.peers, x.after);
    }
    x.list = x.results = plan->list;
    *ring = (struct host_ring){
        .all = x,
        .local = h ? h->local : group,
        .mean_nbytes = size_round_up(longest * x.codes.element, CACHE_LINE),
        .piece = {.spans = (struct span *)(ring + 1), .capacity = spans},
    };
    ring->mean = reduction_of(&exec->kernels, KERNEL_SUM, x.encoder.dtype, 1.0, 1.0 / ring->local->size);
    plan->operands.begin_pipeline = begin_pipeline;
    plan->operands.local = ring->local;
    schedule_pieces(plan_begin(plan, h && h->index == 0 ? h->cross : ring->local), segments_in_chunk(&x.codes.cut), PIECES,
                    begin_piece, end_piece, ring);
    return BHVD_OK;
}

const struct primitive d_lp_s = {plan_among, plan_hosts};
