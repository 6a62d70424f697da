// Builds kernel tables. Its only state is the CPU's features, and its table.
#include "kernel/kernel.h"

#include <string.h>

#include "kernel/variants.h"

// Queried once, when the library is loaded: in a virtual machine CPUID takes as long as a small collective.
static unsigned features;
static struct kernel_table best;

unsigned cpu_features(void) { return features; }

const struct kernel_table *kernel_table_best(void) { return &best; }

#define INIT(family) family##_kernels_init(table);
#define INIT_AVX2(family) family##_kernels_init_avx2(table);
#define INIT_AVX512(family) family##_kernels_init_avx512(table);

void kernel_table_init(struct kernel_table *table, unsigned cpu)
{
    memset(table, 0, sizeof *table);
    FAMILIES(INIT)
    if (cpu & CPU_AVX2) {
        copy_kernels_init_avx2(table, cpu);
        FAMILIES_AVX2(INIT_AVX2)
    }
    if (cpu & CPU_AVX512) {
        FAMILIES_AVX512(INIT_AVX512)
    }
}

__attribute__((constructor)) static void ask_cpu(void)
{
    features = variants_cpu_features();
    kernel_table_init(&best, features);
}

const char *bhvd_cpu_features(void)
{
    const unsigned cpu = cpu_features();
    return cpu & CPU_AVX512 ? "avx512" : cpu & CPU_AVX2 ? "avx2" : "scalar";
}

// Volatile, lest link-time optimization copies the characters into code: a test changes them in the library's file to make another
// release.
#define TEXT_OF(value) #value
#define TEXT(value) TEXT_OF(value)
static const char *const volatile version = TEXT(BHVD_VERSION);

const char *bhvd_version(void) { return version; }
