// C_LP_S: centralized, low precision, synchronous. An allreduce whose messages are encoded by a codec Q (inverse D).
// The vector x of N elements is cut into n chunks; chunk k belongs to rank k.
//
//     v_i   = x_i + delta_i;            delta_i = v_i - D(Q(v_i))             worker error, when given
//     u_k   = mean_i D(Q(v_i[k])) + epsilon_k;   epsilon_k = u_k - D(Q(u_k))    server error, when given
//     out   = concat_k D(Q(u_k))
//
// Rank k adds its own chunk decoded, and decodes its own result, so that all ranks end bit-equal. The sum over i is
// taken in float32, in rank order, then multiplied by 1/n (or not, for a sum) and rounded to the dtype once.
// Wire: 2 (n-1) encoded chunks each way per rank. A chunk is sent as soon as it is encoded.
#include "primitive/primitive.h"

#include <math.h>
#include <stdlib.h>

#include "core/progress.h"

struct exchange {
    bhvd_context *ctx;
    struct process_set *set;
    bhvd_dtype dtype;
    size_t element, count, encoded;         // encoded: bytes of the longest chunk
    const struct kernel_codec *codec;
    struct bhvd_codec_options options;
    kernel_to_float_fn to_float;
    kernel_from_float_fn from_float;
    unsigned char *vector;                  // x, later the result
    unsigned char *codes, *received;        // n encoded chunks each
    unsigned char *decoded;                 // one chunk in the dtype
    float *sum, *wide;                      // one chunk in float32
    struct transfer *transfers;
};

static size_t chunk_begin(const struct exchange *x, int k)
{
    size_t n = (size_t)x->set->size, at = (size_t)k, longer = x->count % n;
    return x->count / n * at + (at < longer ? at : longer);
}

static size_t chunk_count(const struct exchange *x, int k) { return chunk_begin(x, k + 1) - chunk_begin(x, k); }

static size_t encoded_size(const struct exchange *x, int k)
{
    return x->codec->encoded_size(x->dtype, chunk_count(x, k), &x->options);
}

// Encodes `count` elements with error feedback: value += error; error = value - D(Q(value)).
static void encode_with_error(struct exchange *x, unsigned char *code, unsigned char *value, size_t count, float *error)
{
    if (error) {
        x->to_float(x->wide, value, count);
        x->ctx->kernels.reduce[KERNEL_SUM][BHVD_FLOAT32](x->wide, x->wide, error, count);
        x->from_float(value, x->wide, count);
    }
    x->codec->encode(code, value, count, &x->options);
    if (error) {
        // The error is taken against the float32 value, so that what rounding to the dtype lost is fed back too.
        memcpy(error, x->wide, count * sizeof *error);
        x->codec->decode(x->decoded, code, count, &x->options);
        x->to_float(x->wide, x->decoded, count);
        // A NaN or Inf is for the user to see in the result, once; fed back it would never go away.
        for (size_t i = 0; i < count; i++) {
            float e = error[i] - x->wide[i];
            error[i] = isfinite(e) ? e : 0.0f;
        }
    }
}

// Every chunk to its owner.
static bhvd_status scatter(struct exchange *x, float *worker_error)
{
    const int n = x->set->size, me = x->set->rank;
    int posted = 0;
    for (int i = 0; i < n; i++) {
        if (i != me)
            link_post_recv(collective_link(x->ctx, x->set, i), &x->transfers[posted++],
                           x->received + (size_t)i * x->encoded, encoded_size(x, me));
    }
    for (int step = 0; step < n; step++) {
        int k = (me + 1 + step) % n;        // everyone begins with another owner; the own chunk comes last
        size_t begin = chunk_begin(x, k);
        unsigned char *code = k == me ? x->received + (size_t)me * x->encoded : x->codes + (size_t)k * x->encoded;
        encode_with_error(x, code, x->vector + begin * x->element, chunk_count(x, k),
                          worker_error ? worker_error + begin : NULL);
        if (k != me)
            link_post_send(collective_link(x->ctx, x->set, k), &x->transfers[posted++], code, encoded_size(x, k));
        progress_look(x->ctx);              // move what can be moved while the next chunk is encoded
    }
    return progress_transfers(x->ctx, x->transfers, posted);
}

// The own chunk: decode all, reduce, encode the result.
static void reduce(struct exchange *x, double factor, float *server_error, unsigned char *code)
{
    const int n = x->set->size, me = x->set->rank;
    const size_t count = chunk_count(x, me);
    unsigned char *own = x->vector + chunk_begin(x, me) * x->element;
    memset(x->sum, 0, count * sizeof *x->sum);
    for (int i = 0; i < n; i++)
        x->codec->decode_add(x->sum, x->received + (size_t)i * x->encoded, count, &x->options);
    if (factor != 1.0)
        x->ctx->kernels.scale[BHVD_FLOAT32](x->sum, x->sum, factor, count);
    x->from_float(own, x->sum, count);
    encode_with_error(x, code, own, count, server_error);
}

// Everyone's encoded result to everyone.
static bhvd_status gather(struct exchange *x)
{
    const int n = x->set->size, me = x->set->rank;
    const unsigned char *mine = x->codes + (size_t)me * x->encoded;
    int posted = 0;
    for (int i = 0; i < n; i++) {
        if (i == me)
            continue;
        struct link *link = collective_link(x->ctx, x->set, i);
        link_post_send(link, &x->transfers[posted++], mine, encoded_size(x, me));
        link_post_recv(link, &x->transfers[posted++], x->received + (size_t)i * x->encoded, encoded_size(x, i));
    }
    bhvd_status status = progress_transfers(x->ctx, x->transfers, posted);
    for (int k = 0; k < n && !status; k++)
        x->codec->decode(x->vector + chunk_begin(x, k) * x->element,
                         k == me ? mine : x->received + (size_t)k * x->encoded, chunk_count(x, k), &x->options);
    return status;
}

static size_t align64(size_t size) { return (size + 63) / 64 * 64; }

// Lays the working memory out in the two scratch buffers.
static bool exchange_init(struct exchange *x, size_t nbytes)
{
    const size_t n = (size_t)x->set->size, longest = bhvd_chunk_count(x->count, x->set->size);
    x->encoded = align64(x->codec->encoded_size(x->dtype, longest, &x->options));
    x->vector = fusion_acquire(x->ctx, 0, nbytes);
    unsigned char *scratch = fusion_acquire(
        x->ctx, 1, 2 * n * x->encoded + 2 * align64(longest * sizeof(float)) + align64(longest * x->element));
    x->transfers = calloc(2 * n, sizeof *x->transfers);
    if (!x->vector || !scratch || !x->transfers)
        return false;
    x->codes = scratch;
    x->received = x->codes + n * x->encoded;
    x->sum = (float *)(x->received + n * x->encoded);
    x->wide = (float *)((char *)x->sum + align64(longest * sizeof(float)));
    x->decoded = (unsigned char *)x->wide + align64(longest * sizeof(float));
    return true;
}

bhvd_status c_lp_s(bhvd_context *ctx, struct process_set *set, struct bhvd_handle *op)
{
    struct span_list list = {0};
    bhvd_status status = primitive_spans(ctx, op, &list);
    const bhvd_dtype dtype = op->tensors[0].dtype;
    struct exchange x = {
        .ctx = ctx,
        .set = set,
        .dtype = dtype,
        .element = bhvd_dtype_size(dtype),
        .count = list.nbytes / bhvd_dtype_size(dtype),
        .codec = &ctx->kernels.codecs[BHVD_CODEC_MINMAX_UINT8][dtype],
        .to_float = ctx->kernels.to_float[dtype],
        .from_float = ctx->kernels.from_float[dtype],
    };
    double factor = op->postscale_factor / (op->op == BHVD_OP_AVERAGE ? set->size : 1);
    if (!status && !exchange_init(&x, list.nbytes))
        status = context_fail(ctx, BHVD_ERR_SYSTEM, "no memory for a fusion buffer of %zu bytes", list.nbytes);
    if (!status && x.count) {
        struct span_cursor in = span_cursor_at(&list, 0), out = span_cursor_at(&list, 0);
        span_pack(&in, x.vector, list.nbytes);
        if (op->prescale_factor != 1.0)
            ctx->kernels.scale[dtype](x.vector, x.vector, op->prescale_factor, x.count);
        status = scatter(&x, op->worker_error);
        if (!status)
            reduce(&x, factor, op->server_error, x.codes + (size_t)set->rank * x.encoded);
        if (!status)
            status = gather(&x);
        if (!status)
            span_unpack(&out, x.vector, list.nbytes);
    }
    free(x.transfers);
    span_list_fini(&list);
    return status;
}

size_t bhvd_chunk_count(size_t count, int size)
{
    return size < 1 ? 0 : (count + (size_t)size - 1) / (size_t)size;
}
