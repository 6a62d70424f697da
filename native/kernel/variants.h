// The families of kernels. Each fills its part of the table with the scalar definitions, <family>_kernels_init; then
// <family>_kernels_init_<isa> replace those that they improve. The only file that asks which processor the kernels are compiled
// for.
#pragma once

#include "kernel/adam.h"
#include "kernel/kernel.h"

// The families with kernels for an instruction set. Copies also have AVX2 kernels, which depend on the CPU's vendor.
#define FAMILIES_AVX512(each) each(minmax_uint8) each(sign) each(blocks) each(rotated)
#define FAMILIES_AVX2(each) FAMILIES_AVX512(each) each(half) each(topk) each(reduce) each(scale)
#define FAMILIES(each) FAMILIES_AVX2(each) each(float32) each(copy)

#define DECLARE(family) void family##_kernels_init(struct kernel_table *table);
FAMILIES(DECLARE)

#if defined(__x86_64__)
#include <cpuid.h>

#define DECLARE_AVX2(family) void family##_kernels_init_avx2(struct kernel_table *table);
#define DECLARE_AVX512(family) void family##_kernels_init_avx512(struct kernel_table *table);
void adam_kernels_init_avx2(struct adam_kernels *kernels, bhvd_dtype flat);
void copy_kernels_init_avx2(struct kernel_table *table, unsigned cpu);

// Reads CPUID directly: with a compiler without libgcc, __builtin_cpu_supports returns 0 for everything. A feature counts only if
// the operating system saves its registers.
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
#define DECLARE_AVX2(family) static inline void family##_kernels_init_avx2(struct kernel_table *table) { (void)table; }
#define DECLARE_AVX512(family) static inline void family##_kernels_init_avx512(struct kernel_table *table) { (void)table; }
static inline void adam_kernels_init_avx2(struct adam_kernels *kernels, bhvd_dtype flat) { (void)kernels, (void)flat; }
static inline void copy_kernels_init_avx2(struct kernel_table *table, unsigned cpu) { (void)table, (void)cpu; }
static inline unsigned variants_cpu_features(void) { return 0; }
#endif

FAMILIES_AVX2(DECLARE_AVX2)
FAMILIES_AVX512(DECLARE_AVX512)
