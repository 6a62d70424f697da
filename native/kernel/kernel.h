// The table of compute kernels: what each must do is defined by its scalar version, and every other version agrees with
// it bit for bit. Arguments always in the order dst, sources, count; pointers may have any alignment; counts may be 0.
//
// The table is filled in rising order (scalar, then avx2, then avx512 where it pays): the last one that the CPU can run
// stays. No kernel allocates, blocks or keeps state. NaN: sum/product propagate; min/max return NaN when either is NaN.
#ifndef BHVD_KERNEL_H
#define BHVD_KERNEL_H

#include "bagua_hvd.h"

enum { CPU_AVX2 = 1, CPU_AVX512 = 2 };          // CPU_AVX2 implies F16C and FMA present (FMA is not used: see below)

enum kernel_reduction { KERNEL_SUM, KERNEL_PRODUCT, KERNEL_MIN, KERNEL_MAX, KERNEL_REDUCTION_COUNT };

// dst[i] = a[i] (op) b[i]. dst may equal a or b, no other overlap. float16 and bfloat16: computed in float32, rounded to
// nearest even. Integers wrap modulo 2^bits. bool: SUM and MAX are or, PRODUCT and MIN are and, results 0 or 1.
typedef void (*kernel_reduce_fn)(void *dst, const void *a, const void *b, size_t count);

// dst[i] = src[i] * factor. dst may equal src. float32: factor rounded to float32 first, then a float32 product;
// float16, bfloat16: product in float32, rounded to nearest even; float64: in double; integers: product in double,
// truncated towards zero, saturated at the type's limits; bool: copied unchanged.
typedef void (*kernel_scale_fn)(void *dst, const void *src, double factor, size_t count);

// Encodes count elements of src to bhvd_encoded_size bytes at dst / decodes them. Layout: kernel/minmax_uint8.h.
typedef void (*kernel_encode_fn)(void *dst, const void *src, size_t count);
typedef void (*kernel_decode_fn)(void *dst, const void *src, size_t count);
// dst[i] += decoded[i], dst in float32 whatever the encoded dtype: the accumulation of C_LP_S.
typedef void (*kernel_decode_add_fn)(float *dst, const void *src, size_t count);

// dtype <-> float32 (float32: a copy). Rounds to nearest even. NULL for integers and bool.
typedef void (*kernel_to_float_fn)(float *dst, const void *src, size_t count);
typedef void (*kernel_from_float_fn)(void *dst, const float *src, size_t count);

struct kernel_codec {
    kernel_encode_fn encode;            // NULL: the codec does not take this dtype
    kernel_decode_fn decode;
    kernel_decode_add_fn decode_add;
};

struct kernel_table {
    kernel_reduce_fn reduce[KERNEL_REDUCTION_COUNT][BHVD_DTYPE_COUNT];
    kernel_scale_fn scale[BHVD_DTYPE_COUNT];
    kernel_to_float_fn to_float[BHVD_DTYPE_COUNT];
    kernel_from_float_fn from_float[BHVD_DTYPE_COUNT];
    struct kernel_codec minmax_uint8[BHVD_DTYPE_COUNT];
};

// What the CPU can run (CPU_* bits), asked once through CPUID including the operating system's part (XGETBV).
unsigned cpu_features(void);

// Fills the table for a CPU with these features; cpu = 0 gives the scalar definitions.
void kernel_table_init(struct kernel_table *table, unsigned cpu);

// Bytes of `count` encoded elements, 0 when the dtype is not taken.
size_t minmax_uint8_size(bhvd_dtype dtype, size_t count);

// Each family fills its part, scalar first. kernel_table_init calls them in order.
void reduce_kernels_init(struct kernel_table *table, unsigned cpu);
void scale_kernels_init(struct kernel_table *table, unsigned cpu);
void cast_kernels_init(struct kernel_table *table, unsigned cpu);
void minmax_uint8_kernels_init(struct kernel_table *table, unsigned cpu);

#endif
