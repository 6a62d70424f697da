// The SIMD halves of each kernel family: they overwrite what they improve in a table that already holds the scalar
// definitions. The only place where kernels ask which processor they are compiled for.
#ifndef BHVD_KERNEL_VARIANTS_H
#define BHVD_KERNEL_VARIANTS_H

#include "kernel/kernel.h"

#if defined(__x86_64__)

void copy_kernels_init_avx2(struct kernel_table *table, unsigned cpu);
void reduce_kernels_init_avx2(struct kernel_table *table);
void scale_kernels_init_avx2(struct kernel_table *table);
void cast_kernels_init_avx2(struct kernel_table *table);
void minmax_uint8_kernels_init_avx2(struct kernel_table *table);
void minmax_uint8_kernels_init_avx512(struct kernel_table *table);
void sign_kernels_init_avx2(struct kernel_table *table);
void sign_kernels_init_avx512(struct kernel_table *table);
void ternary_kernels_init_avx2(struct kernel_table *table);
void ternary_kernels_init_avx512(struct kernel_table *table);
void qsgd_kernels_init_avx2(struct kernel_table *table);
void qsgd_kernels_init_avx512(struct kernel_table *table);
void half_kernels_init_avx2(struct kernel_table *table);
void topk_kernels_init_avx2(struct kernel_table *table);

// libgcc asked CPUID and XGETBV once, before main: a feature counts only when the operating system saves its registers.
static inline unsigned variants_cpu_features(void)
{
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("f16c") || !__builtin_cpu_supports("fma"))
        return 0;
    const unsigned avx2 = CPU_AVX2 | (__builtin_cpu_is("intel") ? CPU_INTEL : 0);
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
        !__builtin_cpu_supports("avx512vl") || !__builtin_cpu_supports("avx512dq"))
        return avx2;
    return avx2 | CPU_AVX512;
}

#else

static inline void copy_kernels_init_avx2(struct kernel_table *table, unsigned cpu) { (void)table, (void)cpu; }
static inline void reduce_kernels_init_avx2(struct kernel_table *table) { (void)table; }
static inline void scale_kernels_init_avx2(struct kernel_table *table) { (void)table; }
static inline void cast_kernels_init_avx2(struct kernel_table *table) { (void)table; }
static inline void minmax_uint8_kernels_init_avx2(struct kernel_table *table) { (void)table; }
static inline void minmax_uint8_kernels_init_avx512(struct kernel_table *table) { (void)table; }
static inline void sign_kernels_init_avx2(struct kernel_table *table) { (void)table; }
static inline void sign_kernels_init_avx512(struct kernel_table *table) { (void)table; }
static inline void ternary_kernels_init_avx2(struct kernel_table *table) { (void)table; }
static inline void ternary_kernels_init_avx512(struct kernel_table *table) { (void)table; }
static inline void qsgd_kernels_init_avx2(struct kernel_table *table) { (void)table; }
static inline void qsgd_kernels_init_avx512(struct kernel_table *table) { (void)table; }
static inline void half_kernels_init_avx2(struct kernel_table *table) { (void)table; }
static inline void topk_kernels_init_avx2(struct kernel_table *table) { (void)table; }
static inline unsigned variants_cpu_features(void) { return 0; }

#endif

#endif
