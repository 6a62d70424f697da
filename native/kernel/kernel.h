// The table of compute kernels. The scalar version defines each kernel; the others must give the same bits, except in a NaN.
// tests/native/test_kernels.c compares them; -ffp-contract=off (build.py) keeps the compiler from fusing a multiplication with an
// addition in some of them. Arguments are in the order dst, sources, count; pointers may have any alignment; counts may be 0.
//
// The table is filled in rising order (scalar, then avx2, then avx512 where it is faster): the last one that the CPU can run stays.
// No kernel allocates, blocks or keeps state. NaN: sum/product propagate; min/max return NaN when either is NaN.
#pragma once

#include <stdbool.h>

#include "bagua_hvd.h"

// CPU_AVX2 implies that F16C and FMA are present (FMA is used only for exact products). CPU_INTEL: the vendor.
enum { CPU_AVX2 = 1, CPU_AVX512 = 2, CPU_INTEL = 4 };

enum kernel_reduction { KERNEL_SUM, KERNEL_PRODUCT, KERNEL_MIN, KERNEL_MAX, KERNEL_REDUCTION_COUNT };

// dst[i] = a[i] (op) b[i]. dst may equal a or b, no other overlap. float16 and bfloat16: computed in float32, rounded
// to nearest even. Integers wrap modulo 2^bits. bool: SUM and MAX are or, PRODUCT and MIN are and, results 0 or 1.
typedef void (*kernel_reduce_fn)(void *dst, const void *a, const void *b, size_t count);

// dst[i] = src[i] * factor. dst may equal src. float32: factor rounded to float32 first, then a float32 product; float16, bfloat16:
// product in float32, rounded to nearest even; float64: in double; integers: product in double, truncated towards zero, saturated
// at the type's limits; if the factor is that of a mean (1 / n in double), the quotient by n; bool: copied unchanged.
typedef void (*kernel_scale_fn)(void *dst, const void *src, double factor, size_t count);

// Codecs. options: never NULL; all zeros are the defaults. Layouts: kernel/codec.h and kernel/<codec>.h, or <codec>_kernels.c.
// Bytes of `count` encoded elements; 0 for options out of range.
typedef size_t (*kernel_encoded_size_fn)(bhvd_dtype dtype, size_t count, const struct bhvd_codec_options *options);
// Encodes count elements of src to encoded_size bytes at dst.
typedef void (*kernel_encode_fn)(void *dst, const void *src, size_t count, const struct bhvd_codec_options *options);
// Decodes encoded_size bytes at src, which may be arbitrary, to count elements at dst.
typedef void (*kernel_decode_fn)(void *dst, const void *src, size_t count, const struct bhvd_codec_options *options);
// dst[i] += decoded[i], dst in float32 whatever the encoded dtype: the accumulation of C_LP_S.
typedef void (*kernel_decode_add_fn)(float *dst, const void *src, size_t count,
                                     const struct bhvd_codec_options *options);

// dtype <-> float32 (float32: a copy). Rounds to nearest even. NULL for integers and bool.
typedef void (*kernel_to_float_fn)(float *dst, const void *src, size_t count);
typedef void (*kernel_from_float_fn)(void *dst, const float *src, size_t count);

// For a codec that quantizes coefficients of a linear transform: its codes can be added as coefficients, so that a sum of codes is
// encoded again without a transform, or transformed back once. Coefficients are float32. encode NULL: the codec has no transform.
struct kernel_transform {
    size_t (*count)(size_t count, const struct bhvd_codec_options *options);        // coefficients of `count` elements
    bool (*are_alike)(const void *a, const void *b);                                // whether the codes have the same transform
    void (*add)(float *sum, const void *src, size_t count, const struct bhvd_codec_options *options);
    // Encodes in the same way as the code `like`. Overwrites the coefficients.
    void (*encode)(void *dst, float *coefficients, size_t count, const void *like, const struct bhvd_codec_options *options);
    // dst = the elements, in the dtype. Overwrites the coefficients.
    void (*invert)(void *dst, float *coefficients, size_t count, const void *like, const struct bhvd_codec_options *options);
};

struct kernel_codec {
    kernel_encoded_size_fn encoded_size;        // NULL, like all members: the codec does not support this dtype
    kernel_encode_fn encode;
    kernel_decode_fn decode;
    kernel_decode_add_fn decode_add;
    uint8_t version;                            // in the header of its codes; 0: they have no header
    struct kernel_transform transform;
};

// Adam. x NULL: no weight decay. sent must differ from all other arrays.
typedef void (*kernel_momentum_fn)(void *sent, const void *m, const void *g, const void *v, const void *x,
                                 const struct bhvd_adam *by, bool in_steps, size_t count);
// Writes x and m. before: the old values of x; may be x.
typedef void (*kernel_step_fn)(void *x, void *m, const void *sent, const void *v, const void *before,
                             const struct bhvd_adam *by, bool in_steps, size_t count);
typedef void (*kernel_variance_fn)(void *used, void *exact, void *own, const void *g, const struct bhvd_adam_variance *by,
                                 size_t count);

struct kernel_adam {
    kernel_momentum_fn momentum;
    kernel_step_fn step;
    kernel_variance_fn variance;
};

// dst = src, of `nbytes` bytes, without overlap.
typedef void (*kernel_copy_fn)(void *dst, const void *src, size_t nbytes);

struct kernel_table {
    kernel_copy_fn long_copy;                   // for megabytes
    kernel_copy_fn streamed_copy;               // for kilobytes, bypassing the caches; NULL: not available
    kernel_reduce_fn reduce[KERNEL_REDUCTION_COUNT][BHVD_DTYPE_COUNT];
    kernel_scale_fn scale[BHVD_DTYPE_COUNT];
    kernel_to_float_fn to_float[BHVD_DTYPE_COUNT];
    kernel_from_float_fn from_float[BHVD_DTYPE_COUNT];
    struct kernel_codec codecs[BHVD_CODEC_COUNT][BHVD_DTYPE_COUNT];
    struct kernel_adam adam[BHVD_DTYPE_COUNT];  // float32 and float64 only
};

// The CPU's features (CPU_* bits), from CPUID and, for the operating system's support, XGETBV.
unsigned cpu_features(void);

// The table for this CPU, set when the library is loaded.
const struct kernel_table *kernel_table_best(void);

// Fills the table for a CPU with these features; cpu = 0 gives the scalar definitions.
void kernel_table_init(struct kernel_table *table, unsigned cpu);
