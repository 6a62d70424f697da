// The codecs on a GPU: whole vectors encoded with error feedback, decoded, and the means of several ranks' codes, by launches
// of native/device/kernels.cu. Same codes, values and errors, bit for bit, as encoder.h makes on the CPU.
//
// Everything is put on a stream; the host waits for nothing. All int results: 0, or the driver's code.
#pragma once

#include "device/scratch.h"
#include "primitive/encoder.h"
#include "run/work.h"

struct device_encoder {
    struct encoder host;                // sizes, options, dtype, rank
    struct bhvd_device *device;
    const struct codec_kernels *kernels;
    int type;                           // place of the dtype's kernels among the four
    uint64_t option;                    // what the kernels take besides
};

// Are there kernels of the codec, for the dtype?
bool device_encoder_takes(bhvd_codec codec, bhvd_dtype dtype);
// And does this device have them?
bool device_encoder_has(const struct bhvd_device *device, bhvd_codec codec, bhvd_dtype dtype);
// Only where it has. rank: of the process set.
struct device_encoder device_encoder_init(const struct kernel_table *kernels, const struct work *work,
                                          struct bhvd_device *device, int rank);

// Where the codes of a vector lie, in whichever memory: segment s of chunk k at k chunk_stride + s segment_stride.
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
    const float *error;                 // NULL: none is fed back; else one for each element,
    float *lost;                        // and where the new ones go, other memory
    enum encoder_pass pass;
    uint64_t begin;                     // place of the vector in the operation's
};

// codes = Q(prescale * values + error); lost = prescale * values + error - D(codes)
int device_encoder_encode(const struct device_encoder *e, const struct encoding *encoding, struct device_scratch *scratch);
// values = D(codes)
int device_encoder_decode(const struct device_encoder *e, const struct code_layout *layout, void *values, const void *codes,
                          void *stream);
// values += D(codes)
int device_encoder_add(const struct device_encoder *e, const struct code_layout *layout, float *values, const void *codes,
                       void *stream);
// dst = weights[0] values + the others times own, left and right, which are NULL where that is 0 (d_lp_s.c)
int device_encoder_mix(const struct device_encoder *e, void *dst, const void *values, float *const *replicas,
                       const double *weights, uint64_t count, void *stream);
// values = factor * sum_i D(codes of rank i), of `ranks` that lie `stride` apart. The layout has one chunk.
int device_encoder_mean(const struct device_encoder *e, const struct code_layout *layout, void *values, const void *codes,
                        uint64_t stride, uint64_t ranks, double factor, void *stream);
// Codecs with a transform (kernel/kernel.h) encode such a mean without error feedback from its coefficients: neither values nor
// errors of the encoding are used.
bool device_encoder_recodes(const struct device_encoder *e);
int device_encoder_recode(const struct device_encoder *e, const struct encoding *encoding, const void *codes, uint64_t stride,
                          uint64_t ranks, double factor, void *stream);
