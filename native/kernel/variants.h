// The SIMD halves of each kernel family: they overwrite what they improve in a table that already holds the scalar
// definitions. The only place where kernels ask which processor they are compiled for.
#ifndef BHVD_KERNEL_VARIANTS_H
#define BHVD_KERNEL_VARIANTS_H

#include "kernel/adam.h"
#include "kernel/kernel.h"

#if defined(__x86_64__)

#include <cpuid.h>

void copy_kernels_init_avx2(struct kernel_table *table, unsigned cpu);
void reduce_kernels_init_avx2(struct kernel_table *table);
void scale_kernels_init_avx2(struct kernel_table *table);
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
void blocks_kernels_init_avx2(struct kernel_table *table);
void blocks_kernels_init_avx512(struct kernel_table *table);
void rotated_kernels_init_avx2(struct kernel_table *table);
void rotated_kernels_init_avx512(struct kernel_table *table);
void adam_kernels_init_avx2(struct adam_kernels *kernels, bhvd_dtype flat);

// The processor itself is asked: where a compiler brings no libgcc, __builtin_cpu_supports says no to everything. A feature
// counts only when the operating system saves its registers.
static inline unsigned variants_cpu_features(void)
{
    enum { YMM_SAVED = 0x06, ZMM_SAVED = 0xe6 };      // bits of XCR0: SSE and AVX; these and the three of AVX-512
    const unsigned avx2_1 = bit_OSXSAVE | bit_AVX | bit_F16C | bit_FMA;
    const unsigned avx512_7 = bit_AVX512F | bit_AVX512BW | bit_AVX512VL | bit_AVX512DQ;
    unsigned eax, ebx, ecx, edx, vendor, saved, features = 0;
    if (!__get_cpuid(0, &eax, &vendor, &ecx, &edx) || !__get_cpuid(1, &eax, &ebx, &ecx, &edx) ||
        (ecx & avx2_1) != avx2_1 || !__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx))
        return 0;
    __asm__("xgetbv" : "=a"(saved), "=d"(edx) : "c"(0));
    if ((ebx & bit_AVX2) && (saved & YMM_SAVED) == YMM_SAVED) {
        features = CPU_AVX2 | (vendor == signature_INTEL_ebx ? CPU_INTEL : 0);
        if ((ebx & avx512_7) == avx512_7 && (saved & ZMM_SAVED) == ZMM_SAVED)
            features |= CPU_AVX512;
    }
    return features;
}

#else

static inline void copy_kernels_init_avx2(struct kernel_table *table, unsigned cpu) { (void)table, (void)cpu; }
static inline void reduce_kernels_init_avx2(struct kernel_table *table) { (void)table; }
static inline void scale_kernels_init_avx2(struct kernel_table *table) { (void)table; }
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
static inline void blocks_kernels_init_avx2(struct kernel_table *table) { (void)table; }
static inline void blocks_kernels_init_avx512(struct kernel_table *table) { (void)table; }
static inline void rotated_kernels_init_avx2(struct kernel_table *table) { (void)table; }
static inline void rotated_kernels_init_avx512(struct kernel_table *table) { (void)table; }
static inline void adam_kernels_init_avx2(struct adam_kernels *kernels, bhvd_dtype flat) { (void)kernels, (void)flat; }
static inline unsigned variants_cpu_features(void) { return 0; }

#endif

#endif
