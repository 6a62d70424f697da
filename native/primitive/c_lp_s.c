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
// numbers of them. Every shard of the vector (collective/hierarchy.h) is a vector of its own, whose owners exchange it;
// error states lie at the places of the elements. Wire: as above with n hosts, per host, and N elements within hosts for
// the mean and for its way back.
#include "primitive/primitive.h"

#include <stdlib.h>

#include "collective/hierarchy.h"
#include "core/progress.h"
#include "primitive/encoder.h"

enum { WINDOW = 3 };            // segments in flight: see above

struct slot {
    unsigned char *sent, *received;     // n codes each, by rank
    struct transfer *scatter, *gather;  // n sends, then n receives, by rank; those not used are done
};

struct exchange {
    bhvd_context *ctx;
    struct process_set *set;
    const struct span_list *list;
    struct encoder encoder;
    size_t count, element;
    size_t begin;                       // of the vector in the operation's, for seeds
    size_t segment, stride;             // of the longest segment: elements, encoded bytes
    double prescale, factor;            // factor: what the sum is multiplied by
    float *worker_error, *server_error;
    unsigned char *result;              // one segment in the dtype
    float *sum;                         // one segment
    struct slot slots[WINDOW];
};

struct part {
    size_t begin, count;        // elements of the vector
};

// Segment s of chunk k; empty past the chunk's end. chunks 1: the vector is one chunk.
static struct part segment_of(const struct exchange *x, int chunks, int k, size_t s)
{
    size_t n = (size_t)chunks, at = (size_t)k, longer = x->count % n;
    size_t begin = x->count / n * at + (at < longer ? at : longer), count = x->count / n + (at < longer);
    size_t skipped = s * ENCODER_SEGMENT, left = count > skipped ? count - skipped : 0;
    return (struct part){begin + skipped, left < ENCODER_SEGMENT ? left : ENCODER_SEGMENT};
}

static unsigned char *sent_at(const struct exchange *x, const struct slot *slot, int i)
{
    return slot->sent + (size_t)i * x->stride;
}

static unsigned char *received_at(const struct exchange *x, const struct slot *slot, int i)
{
    return slot->received + (size_t)i * x->stride;
}

static void post_send(struct exchange *x, struct transfer *transfers, int to, const void *code, size_t size)
{
    if (size && to != x->set->rank)
        link_post_send(collective_link(x->ctx, x->set, to), &transfers[to], code, size);
    else
        transfers[to].done = true;
}

static void post_recv(struct exchange *x, struct transfer *transfers, int from, void *code, size_t size)
{
    struct transfer *transfer = &transfers[x->set->size + from];
    if (size && from != x->set->rank)
        link_post_recv(collective_link(x->ctx, x->set, from), transfer, code, size);
    else
        transfer->done = true;
}

static bhvd_status wait_received(struct exchange *x, struct transfer *transfers, int from)
{
    return progress_transfers(x->ctx, &transfers[x->set->size + from], 1);
}

// code = Q(prescale * x[part] + worker error)
static void encode_values(struct exchange *x, struct part part, unsigned char *code)
{
    const size_t nbytes = part.count * x->element;
    const void *value = span_source(x->list, part.begin * x->element, nbytes, x->encoder.value);
    if (x->prescale != 1.0) {
        x->ctx->kernels.scale[x->encoder.dtype](x->encoder.value, value, x->prescale, part.count);
        value = x->encoder.value;
    }
    encoder_encode(&x->encoder, code, value, part.count, x->worker_error ? x->worker_error + part.begin : NULL,
                   ENCODER_VALUES, x->begin + part.begin);
}

// sum = factor * sum_i D(code of rank i), in rank order, as the codes come
static bhvd_status decode_sum(struct exchange *x, const struct slot *slot, struct transfer *transfers, size_t count)
{
    memset(x->sum, 0, count * sizeof *x->sum);
    for (int i = 0; i < x->set->size; i++) {
        bhvd_status status = wait_received(x, transfers, i);
        if (status)
            return status;
        x->encoder.codec->decode_add(x->sum, received_at(x, slot, i), count, &x->encoder.options);
    }
    if (x->factor != 1.0)
        x->ctx->kernels.scale[BHVD_FLOAT32](x->sum, x->sum, x->factor, count);
    return BHVD_OK;
}

// ---------------------------------------------------------------------------------------------------- SCATTER_GATHER

// Every chunk's segment s to its owner.
static void scatter(struct exchange *x, size_t s)
{
    struct slot *slot = &x->slots[s % WINDOW];
    const int n = x->set->size, me = x->set->rank;
    const size_t mine = encoder_size(&x->encoder, segment_of(x, n, me, s).count);
    for (int i = 0; i < n; i++)
        post_recv(x, slot->scatter, i, received_at(x, slot, i), mine);
    for (int step = 0; step < n; step++) {
        const int k = (me + 1 + step) % n;      // everyone begins with another owner; the own chunk comes last
        const struct part part = segment_of(x, n, k, s);
        unsigned char *code = k == me ? received_at(x, slot, me) : sent_at(x, slot, k);
        if (part.count)
            encode_values(x, part, code);
        post_send(x, slot->scatter, k, code, encoder_size(&x->encoder, part.count));
        progress_look(x->ctx);                  // move what can be moved while the next one is encoded
    }
}

// Segment s of the own chunk: the mean, encoded, to everyone.
static bhvd_status reduce(struct exchange *x, size_t s)
{
    struct slot *slot = &x->slots[s % WINDOW];
    const int n = x->set->size, me = x->set->rank;
    const struct part own = segment_of(x, n, me, s);
    unsigned char *code = sent_at(x, slot, me);
    if (own.count) {
        bhvd_status status = decode_sum(x, slot, slot->scatter, own.count);
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
        post_recv(x, slot->gather, i, received_at(x, slot, i), encoder_size(&x->encoder, segment_of(x, n, i, s).count));
    }
    progress_look(x->ctx);
    return BHVD_OK;
}

// Segment s of all chunks: decoded to where the result belongs.
static bhvd_status gather(struct exchange *x, size_t s)
{
    struct slot *slot = &x->slots[s % WINDOW];
    const int n = x->set->size, me = x->set->rank;
    bhvd_status status = BHVD_OK;
    for (int k = 0; k < n && !status; k++) {
        const struct part part = segment_of(x, n, k, s);
        const unsigned char *code = k == me ? sent_at(x, slot, me) : received_at(x, slot, k);
        const size_t offset = part.begin * x->element, nbytes = part.count * x->element;
        if (part.count == 0)
            continue;
        status = wait_received(x, slot->gather, k);
        if (status)
            break;
        void *to = span_target(x->list, offset, nbytes, x->result);
        x->encoder.codec->decode(to, code, part.count, &x->encoder.options);
        span_store(x->list, offset, nbytes, to);
    }
    // Only now is the slot free for another segment.
    if (!status)
        status = progress_transfers(x->ctx, slot->scatter, n);
    return status ? status : progress_transfers(x->ctx, slot->gather, n);
}

static bhvd_status run_scatter_gather(struct exchange *x)
{
    const size_t segments = (bhvd_chunk_count(x->count, x->set->size) + ENCODER_SEGMENT - 1) / ENCODER_SEGMENT;
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
    const struct part part = segment_of(x, 1, 0, s);
    unsigned char *code = received_at(x, slot, x->set->rank);
    encode_values(x, part, code);
    for (int i = 0; i < x->set->size; i++) {
        post_send(x, slot->gather, i, code, encoder_size(&x->encoder, part.count));
        post_recv(x, slot->gather, i, received_at(x, slot, i), encoder_size(&x->encoder, part.count));
    }
    progress_look(x->ctx);
}

static bhvd_status average_all(struct exchange *x, size_t s)
{
    struct slot *slot = &x->slots[s % WINDOW];
    const struct part part = segment_of(x, 1, 0, s);
    const size_t offset = part.begin * x->element, nbytes = part.count * x->element;
    bhvd_status status = decode_sum(x, slot, slot->gather, part.count);
    if (status)
        return status;
    void *to = span_target(x->list, offset, nbytes, x->result);
    x->encoder.kernels->from_float[x->encoder.dtype](to, x->sum, part.count);
    span_store(x->list, offset, nbytes, to);
    return progress_transfers(x->ctx, slot->gather, x->set->size);
}

static bhvd_status run_allgather(struct exchange *x)
{
    const size_t segments = (x->count + ENCODER_SEGMENT - 1) / ENCODER_SEGMENT;
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
static bool exchange_init(struct exchange *x, const struct bhvd_handle *op, int chunks, struct transfer *transfers)
{
    const size_t n = (size_t)x->set->size;
    x->segment = segment_of(x, chunks, 0, 0).count;     // of the longest chunk
    x->encoder = encoder_init(x->ctx, op, x->set->rank);
    x->stride = encoder_stride(&x->encoder, x->segment);
    const size_t values = encoder_align(x->segment * x->element), floats = encoder_align(x->segment * sizeof(float));
    unsigned char *scratch = fusion_acquire(
        x->ctx, 1, WINDOW * 2 * n * x->stride + values + floats + encoder_scratch_size(&x->encoder, x->segment));
    if (!scratch || !transfers)
        return false;
    for (int i = 0; i < WINDOW; i++) {
        x->slots[i] = (struct slot){scratch, scratch + n * x->stride, transfers, transfers + 2 * n};
        scratch += 2 * n * x->stride;
        transfers += 4 * n;
    }
    x->result = scratch;
    x->sum = (float *)(x->result + values);
    encoder_set_scratch(&x->encoder, (unsigned char *)x->sum + floats, x->segment);
    return true;
}

struct between {
    const struct bhvd_handle *op;
    double prescale;            // of the values, where that has not been done within hosts
    bool is_shard;              // of the operation's vector
};

// Among the members of a set; the vector may be a shard of the operation's, from byte `offset` on.
static bhvd_status run(bhvd_context *ctx, struct process_set *set, const struct span_list *list, size_t offset, void *arg)
{
    const struct between *between = arg;
    const struct bhvd_handle *op = between->op;
    const size_t element = bhvd_dtype_size(op->tensors[0].dtype), begin = offset / element;
    const bool scatters = op->exchange == BHVD_EXCHANGE_SCATTER_GATHER;
    struct exchange x = {
        .ctx = ctx,
        .set = set,
        .list = list,
        .count = list->nbytes / element,
        .element = element,
        .begin = begin,
        .prescale = between->prescale,
        .factor = op->postscale_factor / (op->op == BHVD_OP_AVERAGE ? set->size : 1),
        .worker_error = op->worker_error ? op->worker_error + begin : NULL,
        .server_error = op->server_error,
    };
    if (x.server_error && between->is_shard)
        x.server_error += begin + segment_of(&x, set->size, set->rank, 0).begin;
    struct transfer *transfers = calloc(WINDOW * 4 * (size_t)set->size, sizeof *transfers);
    bhvd_status status = BHVD_OK;
    if (!exchange_init(&x, op, scatters ? set->size : 1, transfers))
        status = context_fail(ctx, BHVD_ERR_SYSTEM, "no memory for codes of %zu bytes", list->nbytes);
    else
        status = scatters ? run_scatter_gather(&x) : run_allgather(&x);
    free(transfers);
    return status;
}

bhvd_status c_lp_s(bhvd_context *ctx, struct process_set *set, struct bhvd_handle *op)
{
    struct span_list list = {0};
    struct between between = {.op = op, .prescale = op->prescale_factor};
    bhvd_status status = primitive_spans(ctx, op, &list);
    if (!status && list.nbytes && op->hierarchical && set->hierarchy) {
        // The mean over hosts of (hosts / n) sums is the mean over ranks, however many each host has; with equally many
        // (hosts / n) sum is the host's mean.
        const double weight = op->op == BHVD_OP_AVERAGE ? (double)set->hierarchy->hosts / set->size : 1.0;
        const struct reduction within = primitive_within(ctx, op->tensors[0].dtype, op->prescale_factor, weight);
        between = (struct between){.op = op, .prescale = 1.0, .is_shard = true};
        status = hierarchical_run(ctx, set, &within, &list, run, &between);
    } else if (!status && list.nbytes) {
        status = run(ctx, set, &list, 0, &between);
    }
    span_list_fini(&list);
    return status;
}

size_t bhvd_chunk_count(size_t count, int size)
{
    return size < 1 ? 0 : (count + (size_t)size - 1) / (size_t)size;
}
