// C_LP_S: centralized, low precision, synchronous. An allreduce whose messages are encoded by a codec Q (inverse D).
//
// SCATTER_GATHER. The vector x of N elements is cut into n chunks; chunk k belongs to rank k.
//
//     v_i   = x_i + delta_i;            delta_i = v_i - D(Q(v_i))             worker error, if there is one
//     u_k   = mean_i D(Q(v_i[k])) + epsilon_k;   epsilon_k = u_k - D(Q(u_k))    server error, if there is one
//     out   = concat_k D(Q(u_k))
//
// Rank k adds its own chunk decoded, and decodes its own result, so that all ranks end bit-equal. The sum over i is taken in
// float32, in rank order, then multiplied by 1/n (or not, for a sum) and rounded to the dtype once.
// Chunks are encoded in segments (encoder.h): while one is encoded, another is sent to the owners, and the mean of a third is sent
// back (coded.h). In place is safe: a segment is written only after it has been sent.
// Cost: 2 (n-1) encoded chunks each way per rank: 2 (n-1) |Q(N/n)| bytes.
//
// ALLGATHER. out = mean_i D(Q(v_i)), computed by every rank from all codes, by the same rules; nothing is quantized again.
// Cost: (n-1) |Q(N)| bytes each way per rank.
//
// A codec may quantize coefficients of a transform (kernel/rotated.h); codes of ranks with the same seed then have the same
// transform, and their coefficients are summed. SCATTER_GATHER encodes this sum directly, without rounding it to the dtype, unless
// there is a server error; otherwise the sum is transformed back once. With different seeds such a codec is handled like any other.
//
// Hierarchical: the ranks are hosts, and x is the host's mean, weighted by its number of ranks if hosts differ in it. Every shard
// of the vector (collective/shards.h) is a vector of its own, exchanged by its owners; error states are at the offsets of the
// elements.
// Cost: as above with n hosts, per host, and N elements within hosts for the mean and as many to distribute the result.
#include "executor/group.h"
#include "primitive/coded.h"

struct c_lp_s {
    struct executor *exec;
    struct encoder encoder;
    struct codes codes;
    struct span_list list;              // values and destinations; empty if a GPU encoded them
    int size;
    size_t begin;                       // offset in the operation's vector in elements, for seeds
    double prescale, factor;            // factor: multiplies the sum
    float *worker_residual, *server_residual;
};

// The terms of a sum: elements if transform is NULL, otherwise coefficients of this transform, as in the code `like`.
struct sum_of {
    const struct kernel_transform *transform;
    const unsigned char *like;
};

// code = Q(prescale * x[values] + worker error)
static void encode(struct c_lp_s *x, const struct byte_range *values, unsigned char *code)
{
    const size_t begin = values->begin / x->encoder.element, count = values->nbytes / x->encoder.element;
    const void *value = span_source(&x->list, values->begin, values->nbytes, x->encoder.value);
    if (x->prescale != 1.0) {
        x->exec->kernels.scale[x->encoder.dtype](x->encoder.value, value, x->prescale, count);
        value = x->encoder.value;
    }
    encoder_encode(&x->encoder, code, value, count, x->worker_residual ? x->worker_residual + begin : NULL, ENCODER_VALUES,
                   x->begin + begin);
}

static const unsigned char *code_of(const struct c_lp_s *x, int i, const unsigned char *own, const unsigned char *received)
{
    return i == x->encoder.rank ? own : received + (size_t)i * x->codes.received.each;
}

// sum = factor * sum_i D(code of rank i), in rank order; or over their coefficients, if all codes have the same transform
static struct sum_of add(const struct c_lp_s *x, float *sum, const unsigned char *own, const unsigned char *received, size_t count)
{
    const struct encoder *e = &x->encoder;
    struct sum_of of = {encoder_transform(e), own};
    for (int i = 0; i < x->size && of.transform; i++)
        if (!of.transform->are_alike(own, code_of(x, i, own, received)))
            of.transform = NULL;
    const size_t sums = of.transform ? of.transform->count(count, &e->options) : count;
    memset(sum, 0, sums * sizeof *sum);
    for (int i = 0; i < x->size; i++)
        (of.transform ? of.transform->add : e->codec->decode_add)(sum, code_of(x, i, own, received), count, &e->options);
    if (x->factor != 1.0)
        x->exec->kernels.scale[BHVD_FLOAT32](sum, sum, x->factor, sums);
    return of;
}

// to = sum, in the dtype. Overwrites the sum.
static void end_sum(const struct c_lp_s *x, void *to, float *sum, struct sum_of of, size_t count)
{
    if (of.transform)
        of.transform->invert(to, sum, count, of.like, &x->encoder.options);
    else
        x->encoder.kernels->from_float[x->encoder.dtype](to, sum, count);
}

// code = Q(mean + server error). Overwrites the sum.
static void reencode(struct c_lp_s *x, const struct byte_range *values, float *sum, struct sum_of of, unsigned char *code)
{
    const size_t begin = values->begin / x->encoder.element, count = values->nbytes / x->encoder.element;
    const size_t chunk = segments_chunk(&x->codes.cut, (uint64_t)x->encoder.rank).begin;
    if (of.transform && !x->server_residual) {
        of.transform->encode(code, sum, count, of.like, &x->encoder.options);
        return;
    }
    const void *mean = sum;
    if (of.transform || x->encoder.dtype != BHVD_FLOAT32) {
        end_sum(x, x->encoder.value, sum, of, count);
        mean = x->encoder.value;
    }
    encoder_encode(&x->encoder, code, mean, count, x->server_residual ? x->server_residual + (begin - chunk) : NULL, ENCODER_MEAN,
                   x->begin + begin);
}

static void run_custom_step(void *arg, const struct step *step, unsigned char *const *buffers)
{
    struct c_lp_s *x = arg;
    const struct byte_range *values = &step->values;
    const size_t count = values->nbytes / x->encoder.element;
    struct sum_of of = {0};
    const struct kernel_transform *transform = encoder_transform(&x->encoder);
    const size_t longest = segments_part(&x->codes.cut, 0, 0).count;
    const size_t sums = transform ? transform->count(longest, &x->encoder.options) : longest;   // over elements, or coefficients
    const struct coded_scratch scratch = coded_acquire(x->exec, &x->encoder, &x->codes, sums);
    if (!scratch.values)
        return;
    if (step->kind == STEP_REENCODE || step->kind == STEP_COMBINE)
        of = add(x, scratch.floats, location_pointer(buffers, step->other), location_pointer(buffers, step->from), count);
    if (step->kind == STEP_ENCODE) {
        encode(x, values, location_pointer(buffers, step->to));
    } else if (step->kind == STEP_REENCODE) {
        reencode(x, values, scratch.floats, of, location_pointer(buffers, step->to));
    } else {
        void *to = span_target(&x->list, values->begin, values->nbytes, scratch.values);
        if (step->kind == STEP_DECODE)
            x->encoder.codec->decode(to, location_pointer(buffers, step->from), count, &x->encoder.options);
        else
            end_sum(x, to, scratch.floats, of, count);
        span_store(&x->list, values->begin, values->nbytes, to);
    }
    executor_release(x->exec, scratch.values);
}

static struct c_lp_s c_lp_s_of(struct executor *exec, const struct collective *coll, size_t nbytes, int size, int rank,
                               const struct network_cost *network)
{
    return (struct c_lp_s){
        .exec = exec,
        .encoder = encoder_init(&exec->kernels, coll, rank),
        .codes = coded_of(coll, nbytes, size, rank, network),
        .size = size,
        .prescale = coll->args.prescale_factor,
        .factor = collective_sum_factor(coll, size),
        .worker_residual = coll->args.worker_residual,
        .server_residual = coll->args.server_residual,
    };
}

static bhvd_status plan_among(struct executor *exec, struct group *group, const struct collective *coll,
                              const struct gpu_codes *gpu, struct span_list *list, struct plan *plan)
{
    struct c_lp_s *x = primitive_create(exec, sizeof *x, coll, run_custom_step, list, plan);
    if (!x)
        return exec->failure.status;
    *x = c_lp_s_of(exec, coll, collective_nbytes(coll), group->size, group->rank, &exec->network);
    x->list = plan->list;
    if (gpu)
        coded_on_gpu(&x->codes, gpu, &plan->operands);
    coded_schedule(plan_begin(plan, group), &x->codes);
    return BHVD_OK;
}

// ----------------------------------------------------------------------------------------------------------- hierarchical

static void run_shard_step(const struct shards *shards, struct byte_range mine, const struct span_list *shard,
                           const struct step *step, unsigned char *const *buffers)
{
    const struct collective *coll = shards->coll;
    struct c_lp_s x = c_lp_s_of(shards->exec, coll, mine.nbytes, shards->h->hosts, shards->h->host, &shards->network);
    x.list = *shard;
    x.begin = mine.begin / x.codes.element;
    x.prescale = 1.0;                           // the prescale is applied within hosts
    if (x.worker_residual)
        x.worker_residual += x.begin;
    if (x.server_residual && x.codes.pattern == CODES_TO_OWNERS)
        x.server_residual += x.begin + segments_chunk(&x.codes.cut, (uint64_t)x.encoder.rank).begin;
    run_custom_step(&x, step, buffers);
}

static void write_shard(const struct shards *shards, struct schedule *schedule, struct byte_range mine)
{
    const struct codes codes = coded_of(shards->coll, mine.nbytes, shards->h->hosts, shards->h->host, &shards->network);
    coded_schedule(schedule, &codes);
}

// Plans the exchange among hosts, each with the sum of its members.
static bhvd_status plan_hosts(struct executor *exec, struct group *group, const struct collective *coll,
                              const struct gpu_codes *gpu, struct span_list *list, struct plan *plan)
{
    (void)gpu;
    static const struct shards_work work = {PRIMITIVE_SHARD_BYTES, PRIMITIVE_SHARDS_IN_FLIGHT, write_shard, run_shard_step};
    // The mean over hosts of (hosts / n) sums is the mean over ranks, even if hosts differ in size; if they are equal, (hosts / n)
    // sum is the host's mean.
    const double weight = coll->args.op == BHVD_OP_AVERAGE ? (double)group->hierarchy->hosts / group->size : 1.0;
    const struct reduction within = reduction_of(&exec->kernels, KERNEL_SUM, coll->tensors[0].dtype, coll->args.prescale_factor,
                                                 weight);
    return shards_plan(exec, group, coll, &within, &work, list, plan);
}

const struct primitive c_lp_s = {plan_among, plan_hosts};

size_t bhvd_chunk_count(size_t count, int size) { return size < 1 ? 0 : (count + (size_t)size - 1) / (size_t)size; }
