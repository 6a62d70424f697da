#include "gpu/device_encoder.h"

#include "kernel/qsgd.h"
#include "kernel/ternary.h"

enum {
    THREADS = 256,
    PER_BLOCK = 4096,                   // elements of a segment that one block of threads encodes or decodes
    BLOCKS_MAX = 4096,                  // of launches over all elements: several times what any GPU runs at once
    RANGE_BYTES = 24,                   // of minmax_uint8_ranges, for each block
    SUMS_BYTES = SEGMENTS_MAX_COUNT / CODEC_SUMS_BLOCK * (int)sizeof(double),   // of sign_encode, for each segment
    NONE = -1
};

struct codec_kernels {
    int first, encode, last, decode, decode_sum, decode_add;    // first, last: launches before and after; NONE
    int per_block;                                              // elements that a block encodes
};

#define SIGN_KERNELS                                                                                    \
    {NONE, BHVD_DEVICE_SIGN_ENCODE, BHVD_DEVICE_SIGN_HEADER, BHVD_DEVICE_SIGN_DECODE,                   \
     BHVD_DEVICE_SIGN_DECODE_SUM, BHVD_DEVICE_SIGN_DECODE_ADD, THREADS / CODEC_SUMS * CODEC_SUMS_BLOCK}

static const struct codec_kernels KERNELS[BHVD_CODEC_COUNT] = {
    [BHVD_CODEC_MINMAX_UINT8] = {BHVD_DEVICE_MINMAX_UINT8_RANGES, BHVD_DEVICE_MINMAX_UINT8_ENCODE, NONE,
                                 BHVD_DEVICE_MINMAX_UINT8_DECODE, BHVD_DEVICE_MINMAX_UINT8_DECODE_SUM,
                                 BHVD_DEVICE_MINMAX_UINT8_DECODE_ADD, PER_BLOCK},
    [BHVD_CODEC_SIGN] = SIGN_KERNELS,
    [BHVD_CODEC_SIGN_RMS] = SIGN_KERNELS,
    [BHVD_CODEC_TERNARY] = {BHVD_DEVICE_MINMAX_UINT8_RANGES, BHVD_DEVICE_TERNARY_ENCODE, NONE, BHVD_DEVICE_TERNARY_DECODE,
                            BHVD_DEVICE_TERNARY_DECODE_SUM, BHVD_DEVICE_TERNARY_DECODE_ADD, THREADS * TERNARY_BLOCK},
    [BHVD_CODEC_QSGD] = {NONE, BHVD_DEVICE_QSGD_ENCODE, BHVD_DEVICE_QSGD_HEADER, BHVD_DEVICE_QSGD_DECODE,
                         BHVD_DEVICE_QSGD_DECODE_SUM, BHVD_DEVICE_QSGD_DECODE_ADD, THREADS / CODEC_SUMS * QSGD_BLOCK},
};

static int type_of(bhvd_dtype dtype)
{
    return dtype == BHVD_FLOAT32    ? 0
           : dtype == BHVD_FLOAT64  ? 1
           : dtype == BHVD_FLOAT16  ? 2
           : dtype == BHVD_BFLOAT16 ? 3
                                    : NONE;
}

static void *kernel_of(const struct bhvd_device *device, int kernel, int type)
{
    return atomic_load(&device->kernels[kernel + type]);
}

bool device_encoder_takes(bhvd_codec codec, bhvd_dtype dtype) { return KERNELS[codec].encode && type_of(dtype) != NONE; }

bool device_encoder_has(const struct bhvd_device *device, bhvd_codec codec, bhvd_dtype dtype)
{
    const struct codec_kernels *kernels = &KERNELS[codec];
    const int type = type_of(dtype);
    const int needed[] = {kernels->first, kernels->encode, kernels->last, kernels->decode, kernels->decode_sum,
                          kernels->decode_add, BHVD_DEVICE_FEED_ERROR, BHVD_DEVICE_UPDATE_RESIDUAL, BHVD_DEVICE_SCALE_F32,
                          BHVD_DEVICE_MIX};
    bool has = device_encoder_takes(codec, dtype);
    for (size_t i = 0; i < sizeof needed / sizeof needed[0] && has; i++)
        has = needed[i] == NONE || kernel_of(device, needed[i], type);
    return has;
}

struct device_encoder device_encoder_init(const struct kernel_table *kernels, const struct work *op,
                                          struct bhvd_device *device, int rank)
{
    return (struct device_encoder){
        .host = encoder_init(kernels, op, rank),
        .device = device,
        .kernels = &KERNELS[op->codec],
        .type = type_of(op->tensors[0].dtype),
        .option = op->codec == BHVD_CODEC_QSGD ? (uint64_t)qsgd_levels(op->codec_options.parameter)
                                               : op->codec == BHVD_CODEC_SIGN_RMS,
    };
}

struct code_layout device_encoder_layout(const struct device_encoder *e, size_t count, int chunks)
{
    struct code_layout layout = {.cut = {count, (uint64_t)chunks, ENCODER_SEGMENT}};
    const size_t segments = segments_in_chunk(&layout.cut), longest = segments_chunk(&layout.cut, 0).count;
    layout.segment_stride = encoder_stride(&e->host, segments > 1 ? ENCODER_SEGMENT : longest);
    if (segments)
        layout.chunk_stride = (segments - 1) * layout.segment_stride +
                              encoder_stride(&e->host, longest - (segments - 1) * ENCODER_SEGMENT);
    layout.nbytes = (size_t)chunks * layout.chunk_stride;
    return layout;
}

static uint64_t ceiling(uint64_t a, uint64_t b) { return (a + b - 1) / b; }

static int launch(const struct device_encoder *e, int kernel, uint64_t blocks, void **params, void *stream)
{
    return e->device->ops->launch(e->device, kernel_of(e->device, kernel, e->type), (unsigned)blocks, THREADS, params, stream);
}

// Over all elements of a vector.
static int launch_over(const struct device_encoder *e, int kernel, uint64_t count, void **params, void *stream)
{
    const uint64_t blocks = ceiling(count, 4 * THREADS);
    return launch(e, kernel, blocks < BLOCKS_MAX ? blocks : BLOCKS_MAX, params, stream);
}

static uint64_t all_segments(const struct code_layout *layout)
{
    return layout->cut.chunks * segments_in_chunk(&layout->cut);
}

// Blocks for each segment, so that each has per_block elements of the longest one.
static uint64_t per_segment(const struct code_layout *layout, int per_block)
{
    return ceiling(segments_part(&layout->cut, 0, 0).count, (uint64_t)per_block);
}

static size_t scratch_nbytes(const struct codec_kernels *kernels, uint64_t segments, uint64_t blocks)
{
    return kernels->first != NONE                      ? segments * blocks * RANGE_BYTES
           : kernels->encode == BHVD_DEVICE_SIGN_ENCODE ? segments * SUMS_BYTES
                                                        : 0;
}

static int launch_codec(const struct device_encoder *e, const struct encoding *encoding, const void *values,
                        struct device_scratch *scratch)
{
    const struct code_layout *layout = encoding->layout;
    void *ranges = NULL, *codes = encoding->codes;
    uint64_t chunk_stride = layout->chunk_stride, segment_stride = layout->segment_stride, count = layout->cut.count,
             chunks = layout->cut.chunks, segment = layout->cut.segment,
             blocks = per_segment(layout, e->kernels->per_block), option = e->option,
             seed = encoder_seed(e->host.options.seed, e->host.rank, encoding->pass), first = encoding->begin;
    void *params[] = {&codes,   &chunk_stride, &segment_stride, &values, &count, &chunks,
                      &segment, &blocks,       &ranges,         &option, &seed,  &first};
    const uint64_t segments = all_segments(layout);
    const size_t needed = scratch_nbytes(e->kernels, segments, blocks);
    int code = needed ? device_scratch_acquire(scratch, needed, &ranges) : 0;
    if (!code && e->kernels->first != NONE)
        code = launch(e, e->kernels->first, segments * blocks, params, scratch->stream);
    if (!code)
        code = launch(e, e->kernels->encode, segments * blocks, params, scratch->stream);
    blocks = 1;
    if (!code && e->kernels->last != NONE)
        code = launch(e, e->kernels->last, segments, params, scratch->stream);
    return code;
}

int device_encoder_encode(const struct device_encoder *e, const struct encoding *encoding, struct device_scratch *scratch)
{
    uint64_t count = encoding->layout->cut.count;
    const void *values = encoding->values;
    void *vector = NULL, *rounded = NULL;
    float *lost = encoding->lost;
    double prescale = encoding->prescale;
    int code = 0;
    if (prescale != 1.0 || lost)
        code = device_scratch_acquire(scratch, count * e->host.element, &vector);
    if (!code && prescale != 1.0) {
        void *params[] = {&vector, &values, &prescale, &count};
        code = launch_over(e, BHVD_DEVICE_SCALE_F32, count, params, scratch->stream);
        values = vector;
    }
    if (!code && lost) {
        const float *error = encoding->error;
        void *params[] = {&lost, &rounded, &error, &values, &count};
        rounded = e->host.dtype == BHVD_FLOAT32 ? NULL : vector;
        code = launch_over(e, BHVD_DEVICE_FEED_ERROR, count, params, scratch->stream);
        values = rounded ? rounded : lost;
    }
    if (!code)
        code = launch_codec(e, encoding, values, scratch);
    if (!code && lost) {
        void *params[] = {&lost, &vector, &count};
        code = device_encoder_decode(e, encoding->layout, vector, encoding->codes, scratch->stream);
        if (!code)
            code = launch_over(e, BHVD_DEVICE_UPDATE_RESIDUAL, count, params, scratch->stream);
    }
    return code;
}

static int launch_decoder(const struct device_encoder *e, int kernel, const struct code_layout *layout, void *values,
                          const void *codes, void *stream)
{
    uint64_t chunk_stride = layout->chunk_stride, segment_stride = layout->segment_stride, count = layout->cut.count,
             chunks = layout->cut.chunks, segment = layout->cut.segment, blocks = per_segment(layout, PER_BLOCK);
    void *params[] = {&values, &codes, &chunk_stride, &segment_stride, &count, &chunks, &segment, &blocks};
    return launch(e, kernel, all_segments(layout) * blocks, params, stream);
}

int device_encoder_decode(const struct device_encoder *e, const struct code_layout *layout, void *values, const void *codes,
                          void *stream)
{
    return launch_decoder(e, e->kernels->decode, layout, values, codes, stream);
}

int device_encoder_add(const struct device_encoder *e, const struct code_layout *layout, float *values, const void *codes,
                       void *stream)
{
    return launch_decoder(e, e->kernels->decode_add, layout, values, codes, stream);
}

int device_encoder_mix(const struct device_encoder *e, void *dst, const void *values, const float *const *replicas,
                       const double *weights, uint64_t count, void *stream)
{
    const float *own = replicas[0], *left = replicas[1], *right = replicas[2];
    double keep = weights[0], of_own = weights[1], of_left = weights[2], of_right = weights[3];
    void *params[] = {&dst, &values, &own, &left, &right, &keep, &of_own, &of_left, &of_right, &count};
    return launch_over(e, BHVD_DEVICE_MIX, count, params, stream);
}

int device_encoder_mean(const struct device_encoder *e, const struct code_layout *layout, void *values, const void *codes,
                        size_t rank_stride, int ranks, double factor, void *stream)
{
    uint64_t stride = rank_stride, segment_stride = layout->segment_stride, summed = (uint64_t)ranks,
             count = layout->cut.count, segment = layout->cut.segment, blocks = per_segment(layout, PER_BLOCK);
    void *params[] = {&values, &codes, &stride, &segment_stride, &summed, &count, &segment, &blocks, &factor};
    return launch(e, e->kernels->decode_sum, all_segments(layout) * blocks, params, stream);
}
