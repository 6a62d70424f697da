// C_LP_S: centralized, low precision, synchronous. An allreduce whose messages are encoded by a codec Q (inverse D).
//
// SCATTER_GATHER. The vector x of N elements is cut into n chunks; chunk k belongs to rank k.
//
//     v_i   = x_i + delta_i;            delta_i = v_i - D(Q(v_i))             worker error, when given
//     u_k   = mean_i D(Q(v_i[k])) + epsilon_k;   epsilon_k = u_k - D(Q(u_k))    server error, when given
//     out   = concat_k D(Q(u_k))
//
// Rank k adds its own chunk decoded, and decodes its own result, so that all ranks end bit-equal. The sum over i is
// taken in float32, in rank order, then multiplied by 1/n (or not, for a sum) and rounded to the dtype once.
// Chunks are encoded in segments (encoder.h): while segment s is encoded, s-1 is on its way to the owners, and the mean
// of s-2 on its way back. In place is safe: a segment is written when it has been sent.
// Wire: 2 (n-1) encoded chunks each way per rank: 2 (n-1) |Q(N/n)| bytes.
//
// ALLGATHER. out = mean_i D(Q(v_i)), computed by every rank from all codes, by the same rules; no second loss.
// Wire: (n-1) |Q(N)| bytes each way per rank.
//
// Hierarchical: the ranks are hosts, and x is the host's mean, times its share of the ranks where hosts have different
// numbers of them. Every shard of the vector (run/hierarchy.h) is a vector of its own, whose owners exchange it;
// error states lie at the places of the elements. Wire: as above with n hosts, per host, and N elements within hosts for
// the mean and for its way back.
// Where values are encoded and results decoded: c_lp_s.h. This file is what is between.
#include "primitive/c_lp_s.h"

#include <stdlib.h>

#include "run/hierarchy.h"

enum { WINDOW = C_LP_S_WINDOW };        // three: see above

static void post_send(struct exchange *x, struct transfer *transfers, int to, const void *code, size_t size)
{
    if (size && to != x->group->rank)
        group_send(x->run, x->group, to, &transfers[to], code, size);
    else
        transfers[to].done = true;
}

static void post_recv(struct exchange *x, struct transfer *transfers, int from, void *code, size_t size)
{
    struct transfer *transfer = &transfers[x->group->size + from];
    if (size && from != x->group->rank)
        group_receive(x->run, x->group, from, transfer, code, size);
    else
        transfer->done = true;
}

bhvd_status c_lp_s_wait_received(struct exchange *x, struct transfer *transfers, int from)
{
    return run_transfers(x->run, &transfers[x->group->size + from], 1);
}

bhvd_status c_lp_s_sum(struct exchange *x, const struct slot *slot, struct transfer *transfers, size_t count)
{
    memset(x->sum, 0, count * sizeof *x->sum);
    for (int i = 0; i < x->group->size; i++) {
        bhvd_status status = c_lp_s_wait_received(x, transfers, i);
        if (status)
            return status;
        x->encoder.codec->decode_add(x->sum, i == x->group->rank ? slot->own : received_at(x, slot, i), count,
                                     &x->encoder.options);
    }
    if (x->factor != 1.0)
        x->run->kernels.scale[BHVD_FLOAT32](x->sum, x->sum, x->factor, count);
    return BHVD_OK;
}

// ---------------------------------------------------------------------------------------------------- SCATTER_GATHER

// Every chunk's segment s to its owner.
static void scatter(struct exchange *x, size_t s)
{
    struct slot *slot = &x->slots[s % WINDOW];
    const int n = x->group->size, me = x->group->rank;
    const size_t mine = encoder_size(&x->encoder, segments_part(&x->cut, (uint64_t)me, s).count);
    for (int i = 0; i < n; i++)
        post_recv(x, slot->scatter, i, received_at(x, slot, i), mine);
    for (int step = 0; step < n; step++) {
        const int k = (me + 1 + step) % n;      // everyone begins with another owner; the own chunk comes last
        const struct segment_part part = segments_part(&x->cut, (uint64_t)k, s);
        unsigned char *code = x->ends->own(x, k, s, part, k == me ? received_at(x, slot, me) : sent_at(x, slot, k));
        if (k == me)
            slot->own = code;
        post_send(x, slot->scatter, k, code, encoder_size(&x->encoder, part.count));
        run_look(x->run);                  // move what can be moved while the next one is encoded
    }
}

// Segment s of the own chunk: the mean, encoded, to everyone.
static bhvd_status reduce(struct exchange *x, size_t s)
{
    struct slot *slot = &x->slots[s % WINDOW];
    const int n = x->group->size, me = x->group->rank;
    const struct segment_part own = segments_part(&x->cut, (uint64_t)me, s);
    unsigned char *code = x->ends->room(x, slot, me, s);
    if (own.count) {
        bhvd_status status = c_lp_s_sum(x, slot, slot->scatter, own.count);
        if (status)
            return status;
        const void *mean = x->sum;
        if (x->encoder.dtype != BHVD_FLOAT32) {
            x->encoder.kernels->from_float[x->encoder.dtype](x->encoder.value, x->sum, own.count);
            mean = x->encoder.value;
        }
        float *error = x->server_error ? x->server_error + s * ENCODER_SEGMENT : NULL;
        encoder_encode(&x->encoder, code, mean, own.count, error, ENCODER_MEAN, x->begin + own.begin);
    }
    for (int i = 0; i < n; i++) {
        post_send(x, slot->gather, i, code, encoder_size(&x->encoder, own.count));
        post_recv(x, slot->gather, i, x->ends->room(x, slot, i, s),
                  encoder_size(&x->encoder, segments_part(&x->cut, (uint64_t)i, s).count));
    }
    run_look(x->run);
    return BHVD_OK;
}

// Segment s of all chunks: decoded to where the result belongs.
static bhvd_status gather(struct exchange *x, size_t s)
{
    struct slot *slot = &x->slots[s % WINDOW];
    const int n = x->group->size;
    bhvd_status status = BHVD_OK;
    for (int k = 0; k < n && !status; k++) {
        const struct segment_part part = segments_part(&x->cut, (uint64_t)k, s);
        if (part.count == 0)
            continue;
        status = c_lp_s_wait_received(x, slot->gather, k);
        if (!status)
            x->ends->store(x, part, x->ends->room(x, slot, k, s));
    }
    // Only now is the slot free for another segment.
    if (!status)
        status = run_transfers(x->run, slot->scatter, n);
    return status ? status : run_transfers(x->run, slot->gather, n);
}

static bhvd_status run_scatter_gather(struct exchange *x)
{
    const size_t segments = segments_in_chunk(&x->cut);
    bhvd_status status = BHVD_OK;
    for (size_t s = 0; s < segments + 2 && !status; s++) {
        if (s < segments)
            scatter(x, s);
        if (s >= 1 && s - 1 < segments)
            status = reduce(x, s - 1);
        if (s >= 2 && !status)
            status = gather(x, s - 2);
    }
    return status;
}

// --------------------------------------------------------------------------------------------------------- ALLGATHER

static void send_to_all(struct exchange *x, size_t s)
{
    struct slot *slot = &x->slots[s % WINDOW];
    const struct segment_part part = segments_part(&x->cut, 0, s);
    unsigned char *code = x->ends->own(x, x->group->rank, s, part, sent_at(x, slot, x->group->rank));
    slot->own = code;
    for (int i = 0; i < x->group->size; i++) {
        post_send(x, slot->gather, i, code, encoder_size(&x->encoder, part.count));
        post_recv(x, slot->gather, i, x->ends->room(x, slot, i, s), encoder_size(&x->encoder, part.count));
    }
    run_look(x->run);
}

static bhvd_status average_all(struct exchange *x, size_t s)
{
    struct slot *slot = &x->slots[s % WINDOW];
    bhvd_status status = x->ends->average(x, slot, segments_part(&x->cut, 0, s));
    return status ? status : run_transfers(x->run, slot->gather, 2 * x->group->size);
}

static bhvd_status run_allgather(struct exchange *x)
{
    const size_t segments = segments_in_chunk(&x->cut);
    bhvd_status status = BHVD_OK;
    for (size_t s = 0; s < segments + WINDOW - 1 && !status; s++) {
        if (s < segments)
            send_to_all(x, s);
        if (s >= WINDOW - 1)
            status = average_all(x, s - (WINDOW - 1));
    }
    return status;
}

// -------------------------------------------------------------------------------------------------------------------

// Lays the working memory out in a scratch buffer.
static bool exchange_init(struct exchange *x, const struct work *op, struct transfer *transfers)
{
    const size_t n = (size_t)x->group->size, segment = segments_part(&x->cut, 0, 0).count;       // the longest
    x->encoder = encoder_init(&x->run->kernels, op, x->group->rank);
    x->stride = encoder_stride(&x->encoder, segment);
    const size_t values = encoder_align(segment * x->element), floats = encoder_align(segment * sizeof(float));
    unsigned char *scratch = fusion_acquire(
        x->run, 1, WINDOW * 2 * n * x->stride + values + floats + encoder_scratch_size(&x->encoder, segment));
    if (!scratch || !transfers)
        return false;
    for (int i = 0; i < WINDOW; i++) {
        x->slots[i] = (struct slot){scratch, scratch + n * x->stride, NULL, transfers, transfers + 2 * n};
        scratch += 2 * n * x->stride;
        transfers += 4 * n;
    }
    x->result = scratch;
    x->sum = (float *)(x->result + values);
    encoder_set_scratch(&x->encoder, (unsigned char *)x->sum + floats, segment);
    return true;
}

struct between {
    const struct work *op;
    const struct code_ends *ends;
    const void *arg;
    double prescale;            // of the values, where that has not been done within hosts
    bool is_shard;              // of the operation's vector
};

// Among the members of a group; the vector may be a shard of the operation's, from byte `offset` on. list NULL:
// something else has encoded it.
static bhvd_status exchange_run(struct run *run, struct group *group, const struct span_list *list, size_t offset, void *arg,
                                struct flight **flight)
{
    const struct between *between = arg;
    (void)flight;
    const struct work *op = between->op;
    const size_t element = bhvd_dtype_size(op->tensors[0].dtype), begin = offset / element;
    const size_t nbytes = list ? list->nbytes : work_nbytes(op);
    const bool scatters = op->exchange == BHVD_EXCHANGE_SCATTER_GATHER;
    struct exchange x = {
        .run = run,
        .group = group,
        .ends = between->ends,
        .arg = between->arg,
        .list = list,
        .cut = {nbytes / element, scatters ? (uint64_t)group->size : 1, ENCODER_SEGMENT},
        .element = element,
        .begin = begin,
        .prescale = between->prescale,
        .factor = work_sum_factor(op, group->size),
        .worker_error = op->worker_error ? op->worker_error + begin : NULL,
        .server_error = op->server_error,
    };
    if (x.server_error && between->is_shard && scatters)
        x.server_error += begin + segments_chunk(&x.cut, (uint64_t)group->rank).begin;
    struct transfer *transfers = calloc(WINDOW * 4 * (size_t)group->size, sizeof *transfers);
    bhvd_status status = BHVD_OK;
    if (!exchange_init(&x, op, transfers))
        status = run_fail(run, BHVD_ERR_SYSTEM, "no memory for codes of %zu bytes", nbytes);
    else
        status = scatters ? run_scatter_gather(&x) : run_allgather(&x);
    free(transfers);
    return status;
}

bhvd_status c_lp_s(struct run *run, struct group *group, struct work *op, const struct code_ends *ends, const void *arg)
{
    struct span_list list = {0};
    struct between between = {.op = op, .ends = ends ? ends : &c_lp_s_host, .arg = arg, .prescale = op->prescale_factor};
    if (ends)
        return exchange_run(run, group, NULL, 0, &between, NULL);
    bhvd_status status = primitive_spans(run, op, &list);
    if (!status && list.nbytes && primitive_has_levels(group, op->kind, op->hierarchical)) {
        // The mean over hosts of (hosts / n) sums is the mean over ranks, however many each host has; with equally many
        // (hosts / n) sum is the host's mean.
        const double weight = op->op == BHVD_OP_AVERAGE ? (double)group->hierarchy->hosts / group->size : 1.0;
        const struct reduction within = reduction_of(&run->kernels, KERNEL_SUM, op->tensors[0].dtype, op->prescale_factor, weight);
        between.prescale = 1.0;
        between.is_shard = true;
        status = hierarchical_run(run, group, &within, &list, exchange_run, &between);
    } else if (!status && list.nbytes) {
        status = exchange_run(run, group, &list, 0, &between, NULL);
    }
    span_list_fini(&list);
    return status;
}

size_t bhvd_chunk_count(size_t count, int size)
{
    return size < 1 ? 0 : (count + (size_t)size - 1) / (size_t)size;
}
