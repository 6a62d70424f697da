#include "gpu/device_encoder.h"

#include "kernel/codec.h"
#include "kernel/rotated.h"

enum {
    PER_BLOCK = 4096,                   // elements of a segment that one block of threads encodes or decodes
    RANGE_BYTES = 24,                   // of minmax_uint8_ranges, per block
    SUMS_BYTES = SEGMENTS_MAX_COUNT / CODEC_SUMS_BLOCK * (int)sizeof(double),   // of sign_encode, per segment
    NONE = BHVD_DEVICE_COPY_SPANS       // stands for no kernel
};

struct codec_kernels {
    int first, encode, last, decode, decode_sum, decode_add;    // first, last: launched before and after
    int per_block;                                              // elements that one block encodes
    int reencode, bits;                                         // for rotated
};

#define SIGN_KERNELS                                                                                    \
    {NONE, BHVD_DEVICE_SIGN_ENCODE, BHVD_DEVICE_SIGN_HEADER, BHVD_DEVICE_SIGN_DECODE,                   \
     BHVD_DEVICE_SIGN_DECODE_SUM, BHVD_DEVICE_SIGN_DECODE_ADD, DEVICE_THREADS / CODEC_SUMS * CODEC_SUMS_BLOCK}

#define ROTATED_KERNELS(bits)                                                                           \
    {NONE, BHVD_DEVICE_ROTATED_ENCODE, BHVD_DEVICE_ROTATED_HEADER, BHVD_DEVICE_ROTATED_DECODE,          \
     BHVD_DEVICE_ROTATED_DECODE_SUM, BHVD_DEVICE_ROTATED_DECODE_ADD, PER_BLOCK, BHVD_DEVICE_ROTATED_REENCODE, bits}

static const struct codec_kernels KERNELS[BHVD_CODEC_COUNT] = {
    [BHVD_CODEC_MINMAX_UINT8] = {BHVD_DEVICE_MINMAX_UINT8_RANGES, BHVD_DEVICE_MINMAX_UINT8_ENCODE, NONE,
                                 BHVD_DEVICE_MINMAX_UINT8_DECODE, BHVD_DEVICE_MINMAX_UINT8_DECODE_SUM,
                                 BHVD_DEVICE_MINMAX_UINT8_DECODE_ADD, PER_BLOCK},
    [BHVD_CODEC_SIGN] = SIGN_KERNELS,
    [BHVD_CODEC_SIGN_RMS] = SIGN_KERNELS,
    [BHVD_CODEC_ROTATED1] = ROTATED_KERNELS(1),
    [BHVD_CODEC_ROTATED2] = ROTATED_KERNELS(2),
    [BHVD_CODEC_ROTATED3] = ROTATED_KERNELS(3),
    [BHVD_CODEC_ROTATED4] = ROTATED_KERNELS(4),
};

bool device_encoder_supports(bhvd_codec codec, bhvd_dtype dtype) { return KERNELS[codec].encode && device_type_of(dtype) >= 0; }

bool device_encoder_has(const struct bhvd_device *device, bhvd_codec codec, bhvd_dtype dtype)
{
    const struct codec_kernels *kernels = &KERNELS[codec];
    const int needed[] = {kernels->first, kernels->encode, kernels->last, kernels->decode, kernels->decode_sum,
                          kernels->decode_add, kernels->reencode, BHVD_DEVICE_FEED_RESIDUAL, BHVD_DEVICE_UPDATE_RESIDUAL,
                          BHVD_DEVICE_SCALE, BHVD_DEVICE_MIX};
    bool has = device_encoder_supports(codec, dtype);
    for (size_t i = 0; i < sizeof needed / sizeof needed[0] && has; i++)
        has = needed[i] == NONE || device_kernel(device, (bhvd_device_kernel)needed[i], device_type_of(dtype));
    return has;
}

// The codec's parameter, in the form that kernels take.
static uint64_t option_of(const struct collective *coll)
{
    const int bits = KERNELS[coll->args.codec].bits;
    return bits ? (uint64_t)rotated_size(coll->args.codec_options.parameter) << 8 | (uint64_t)bits
                : coll->args.codec == BHVD_CODEC_SIGN_RMS;
}

struct device_encoder device_encoder_init(const struct kernel_table *kernels, const struct collective *coll,
                                          struct bhvd_device *device, int rank)
{
    return (struct device_encoder){
        .host = encoder_init(kernels, coll, rank),
        .device = device,
        .kernels = &KERNELS[coll->args.codec],
        .type = device_type_of(coll->tensors[0].dtype),
        .option = option_of(coll),
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

static int launch(const struct device_encoder *e, int kernel, uint64_t blocks, void **params, void *stream)
{
    return device_launch(e->device, (bhvd_device_kernel)kernel, e->type, blocks, params, stream);
}

static int launch_over(const struct device_encoder *e, bhvd_device_kernel kernel, uint64_t count, void **params, void *stream)
{
    return device_launch_over(e->device, kernel, e->type, count, params, stream);
}

static uint64_t all_segments(const struct code_layout *layout)
{
    return layout->cut.chunks * segments_in_chunk(&layout->cut);
}

// Blocks per segment, so that each gets per_block elements of the longest one.
static uint64_t per_segment(const struct code_layout *layout, int per_block)
{
    return (segments_part(&layout->cut, 0, 0).count + (uint64_t)per_block - 1) / (uint64_t)per_block;
}

static size_t scratch_nbytes(const struct codec_kernels *kernels, uint64_t segments, uint64_t blocks)
{
    return kernels->first != NONE                      ? segments * blocks * RANGE_BYTES
           : kernels->encode == BHVD_DEVICE_SIGN_ENCODE ? segments * SUMS_BYTES
                                                        : 0;
}

// The address of a launch's argument; it is not written.
#define ARGUMENT(value) ((void *)(uintptr_t)&(value))

// blocks: per segment.
static int launch_encoder(const struct device_encoder *e, int kernel, const struct encoding *encoding, const void *values,
                          void *ranges, uint64_t blocks, void *stream)
{
    const struct code_layout *layout = encoding->layout;
    const uint64_t seed = encoder_seed(&e->host, encoding->pass);
    void *params[] = {ARGUMENT(encoding->codes), ARGUMENT(layout->chunk_stride), ARGUMENT(layout->segment_stride),
                      ARGUMENT(values), ARGUMENT(layout->cut.count), ARGUMENT(layout->cut.chunks),
                      ARGUMENT(layout->cut.segment), ARGUMENT(blocks), ARGUMENT(ranges), ARGUMENT(e->option),
                      ARGUMENT(seed), ARGUMENT(encoding->begin)};
    return launch(e, kernel, all_segments(layout) * blocks, params, stream);
}

static int launch_codec(const struct device_encoder *e, const struct encoding *encoding, const void *values,
                        struct device_scratch *scratch)
{
    const struct codec_kernels *kernels = e->kernels;
    const uint64_t blocks = per_segment(encoding->layout, kernels->per_block);
    const size_t needed = scratch_nbytes(kernels, all_segments(encoding->layout), blocks);
    void *ranges = NULL;
    int failed = needed ? device_scratch_acquire(scratch, needed, &ranges) : 0;
    if (!failed && kernels->first != NONE)
        failed = launch_encoder(e, kernels->first, encoding, values, ranges, blocks, scratch->stream);
    failed = failed ?: launch_encoder(e, kernels->encode, encoding, values, ranges, blocks, scratch->stream);
    if (!failed && kernels->last != NONE)
        failed = launch_encoder(e, kernels->last, encoding, values, ranges, 1, scratch->stream);
    return failed;
}

int device_encoder_encode(const struct device_encoder *e, const struct encoding *encoding, struct device_scratch *scratch)
{
    uint64_t count = encoding->layout->cut.count;
    const void *values = encoding->values;
    void *vector = NULL, *rounded = NULL;
    float *new_residual = encoding->new_residual;
    double prescale = encoding->prescale;
    int failed = 0;
    if (prescale != 1.0 || new_residual)
        failed = device_scratch_acquire(scratch, count * e->host.element, &vector);
    if (!failed && prescale != 1.0) {
        void *params[] = {&vector, &values, &prescale, &count};
        failed = launch_over(e, BHVD_DEVICE_SCALE, count, params, scratch->stream);
        values = vector;
    }
    if (!failed && new_residual) {
        const float *residual = encoding->residual;
        void *params[] = {&new_residual, &rounded, &residual, &values, &count};
        rounded = e->host.dtype == BHVD_FLOAT32 ? NULL : vector;
        failed = launch_over(e, BHVD_DEVICE_FEED_RESIDUAL, count, params, scratch->stream);
        values = rounded ? rounded : new_residual;
    }
    failed = failed ?: launch_codec(e, encoding, values, scratch);
    if (!failed && new_residual) {
        void *params[] = {&new_residual, &vector, &count};
        failed = device_encoder_decode(e, encoding->layout, vector, encoding->codes, scratch->stream);
        failed = failed ?: launch_over(e, BHVD_DEVICE_UPDATE_RESIDUAL, count, params, scratch->stream);
    }
    return failed;
}

static int launch_decoder(const struct device_encoder *e, int kernel, const struct code_layout *layout, void *values,
                          const void *codes, void *stream)
{
    const uint64_t blocks = per_segment(layout, PER_BLOCK);
    void *params[] = {ARGUMENT(values), ARGUMENT(codes), ARGUMENT(layout->chunk_stride), ARGUMENT(layout->segment_stride),
                      ARGUMENT(layout->cut.count), ARGUMENT(layout->cut.chunks), ARGUMENT(layout->cut.segment),
                      ARGUMENT(blocks), ARGUMENT(e->option)};
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

int device_encoder_mix(const struct device_encoder *e, void *dst, const void *values, float *const *replicas,
                       const double *weights, uint64_t count, void *stream)
{
    void *params[] = {ARGUMENT(dst), ARGUMENT(values), ARGUMENT(replicas[0]), ARGUMENT(replicas[1]), ARGUMENT(replicas[2]),
                      ARGUMENT(weights[0]), ARGUMENT(weights[1]), ARGUMENT(weights[2]), ARGUMENT(weights[3]),
                      ARGUMENT(count)};
    return launch_over(e, BHVD_DEVICE_MIX, count, params, stream);
}

// The arguments of decode_sum; reencode takes a seed too.
#define SUM_ARGUMENTS(to)                                                                                   \
    ARGUMENT(to), ARGUMENT(codes), ARGUMENT(stride), ARGUMENT(layout->segment_stride), ARGUMENT(ranks),     \
        ARGUMENT(layout->cut.count), ARGUMENT(layout->cut.segment), ARGUMENT(blocks), ARGUMENT(factor), ARGUMENT(e->option)

int device_encoder_mean(const struct device_encoder *e, const struct code_layout *layout, void *values, const void *codes,
                        uint64_t stride, uint64_t ranks, double factor, void *stream)
{
    const uint64_t blocks = per_segment(layout, PER_BLOCK);
    void *params[] = {SUM_ARGUMENTS(values)};
    return launch(e, e->kernels->decode_sum, all_segments(layout) * blocks, params, stream);
}

bool device_encoder_reencodes(const struct device_encoder *e) { return e->kernels->reencode != NONE; }

int device_encoder_reencode(const struct device_encoder *e, const struct encoding *encoding, const void *codes, uint64_t stride,
                            uint64_t ranks, double factor, void *stream)
{
    const struct code_layout *layout = encoding->layout;
    const uint64_t blocks = per_segment(layout, PER_BLOCK), seed = encoder_seed(&e->host, encoding->pass);
    void *params[] = {SUM_ARGUMENTS(encoding->codes), ARGUMENT(seed), ARGUMENT(encoding->begin)};
    int failed = launch(e, e->kernels->reencode, all_segments(layout) * blocks, params, stream);
    return failed ?: launch_encoder(e, e->kernels->last, encoding, NULL, NULL, 1, stream);
}
