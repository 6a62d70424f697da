// Encoding with error feedback and reproducible randomness, for the low-precision primitives.
//
// A vector is encoded in segments of at most ENCODER_SEGMENT elements, each with its own header, so that one is encoded while
// another is on the wire. A smaller segment also has a smaller range, which quantizes better. The segment size is the same for all
// transports, so results do not depend on them.
//
// For the seed of a codec that rounds at random see kernel/segments.h. A codec that rotates (struct kernel_transform) gets the seed
// of rank 0's values on all ranks and in both passes, so that the coefficients of codes with the same seed can be added
// without the inverse transform.
#pragma once

#include "base/size.h"
#include "executor/collective.h"
#include "kernel/kernel.h"
#include "kernel/segments.h"

enum { ENCODER_SEGMENT = SEGMENTS_MAX_COUNT };  // elements

enum encoder_pass { ENCODER_VALUES = 0, ENCODER_MEAN = 1 };

struct encoder {
    const struct kernel_table *kernels;
    const struct kernel_codec *codec;
    struct bhvd_codec_options options;
    bhvd_dtype dtype;
    size_t element;
    int rank;                   // position in the group
    unsigned char *value;       // scratch: one segment in the dtype ...
    float *wide;                // ... and in float32
};

struct encoder encoder_init(const struct kernel_table *kernels, const struct collective *coll, int rank);
// The codec's transform; NULL: it has none.
static inline const struct kernel_transform *encoder_transform(const struct encoder *e)
{
    return e->codec->transform.encode ? &e->codec->transform : NULL;
}

// Bytes of a segment's code, rounded up to whole cache lines, to lay out buffers.
size_t encoder_stride(const struct encoder *e, size_t count);

// code = Q(value + residual); residual = value + residual - D(code). residual NULL: code = Q(value). value may be e->value.
// begin: offset of the segment in the vector, in elements.
void encoder_encode(const struct encoder *e, unsigned char *code, const void *value, size_t count, float *residual,
                    enum encoder_pass pass, size_t begin);

// Mixed with the offset of each segment to get its seed.
static inline uint64_t encoder_seed(const struct encoder *e, enum encoder_pass pass)
{
    const bool is_common = encoder_transform(e);
    return segments_mix(segments_mix(e->options.seed, is_common ? 0 : (uint64_t)e->rank), is_common ? ENCODER_VALUES : pass);
}
