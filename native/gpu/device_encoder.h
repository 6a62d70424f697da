// The codecs on a GPU: encode whole vectors with error feedback, decode them, and compute means of several ranks' codes, by
// launches of native/device/kernels.cu. Codes, values and residuals are bit-equal to those that encoder.h computes on the CPU.
//
// All work is put on a stream; the host never waits. All int results: 0, or the driver's error.
#pragma once

#include "device/buffer.h"
#include "executor/collective.h"
#include "primitive/encoder.h"

struct device_encoder {
    struct encoder host;                // sizes, options, dtype, rank
    struct bhvd_device *device;
    const struct codec_kernels *kernels;
    int type;                           // index of the dtype's kernels among the four
    uint64_t option;                    // the codec's parameter for kernels
};

// Whether there are kernels of the codec for the dtype.
bool device_encoder_supports(bhvd_codec codec, bhvd_dtype dtype);
// Whether this device has loaded them.
bool device_encoder_has(const struct bhvd_device *device, bhvd_codec codec, bhvd_dtype dtype);
// Requires device_encoder_has. rank: in the process set.
struct device_encoder device_encoder_init(const struct kernel_table *kernels, const struct collective *coll,
                                          struct bhvd_device *device, int rank);

// The layout of a vector's codes: segment s of chunk k is at offset k chunk_stride + s segment_stride.
struct code_layout {
    struct segments cut;
    uint64_t chunk_stride, segment_stride;
    size_t nbytes;
};

struct code_layout device_encoder_layout(const struct device_encoder *e, size_t count, int chunks);

struct encoding {
    const struct code_layout *layout;
    void *codes;
    const void *values;                 // layout->cut.count elements
    double prescale;                    // of the values
    const float *residual;              // one per element; NULL: no error feedback
    float *new_residual;                // in other memory
    enum encoder_pass pass;
    uint64_t begin;                     // offset of the vector in the operation's, in elements
};

// codes = Q(prescale * values + residual); new_residual = prescale * values + residual - D(codes)
int device_encoder_encode(const struct device_encoder *e, const struct encoding *encoding, struct device_scratch *scratch);
// values = D(codes)
int device_encoder_decode(const struct device_encoder *e, const struct code_layout *layout, void *values, const void *codes,
                          void *stream);
// values += D(codes)
int device_encoder_add(const struct device_encoder *e, const struct code_layout *layout, float *values, const void *codes,
                       void *stream);
// dst = weights[0] values + the other weights times own, left and right; a replica with weight 0 is NULL (d_lp_s.c)
int device_encoder_mix(const struct device_encoder *e, void *dst, const void *values, float *const *replicas,
                       const double *weights, uint64_t count, void *stream);
// values = factor * sum_i D(codes of rank i), for `ranks` codes at distance `stride`. The layout must have one chunk.
int device_encoder_mean(const struct device_encoder *e, const struct code_layout *layout, void *values, const void *codes,
                        uint64_t stride, uint64_t ranks, double factor, void *stream);
// Whether the codec has a transform (kernel/kernel.h): then such a mean is encoded from its coefficients, without error feedback;
// the values and residuals of the encoding are not used.
bool device_encoder_reencodes(const struct device_encoder *e);
int device_encoder_reencode(const struct device_encoder *e, const struct encoding *encoding, const void *codes, uint64_t stride,
                            uint64_t ranks, double factor, void *stream);
