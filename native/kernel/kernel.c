// Builds kernel tables; the codec functions of the public interface. The only state is the CPU's features, and its table. The only
// file that asks which processor the kernels are compiled for.
#include "kernel/kernel.h"

#include <string.h>

#include "base/dtype.h"
#include "kernel/codec.h"

// The families of kernels. Each fills its part of the table with the scalar definitions, <family>_kernels_init_scalar; then
// <family>_kernels_init_<isa> replace those that they improve.
#define FAMILIES_AVX512(each, isa) each(minmax_uint8, isa) each(sign, isa) each(blocks, isa) each(rotated, isa)
#define FAMILIES(each, isa) \
    FAMILIES_AVX512(each, isa) each(half, isa) each(topk, isa) each(elementwise, isa) each(copy, isa) each(adam, isa)

#define DECLARE(family, isa) void family##_kernels_init_##isa(struct kernel_table *table);
#define INIT(family, isa) family##_kernels_init_##isa(table);
FAMILIES(DECLARE, scalar)

#if defined(__x86_64__)
#include <cpuid.h>

FAMILIES(DECLARE, avx2)
FAMILIES_AVX512(DECLARE, avx512)

static void init_vectors(struct kernel_table *table, unsigned cpu)
{
    if (cpu & CPU_AVX2) {
        FAMILIES(INIT, avx2)
    }
    if (cpu & CPU_AVX512) {
        FAMILIES_AVX512(INIT, avx512)
    }
}

// Reads CPUID directly: with a compiler without libgcc, __builtin_cpu_supports returns 0 for everything. A feature counts only if
// the operating system saves its registers.
static unsigned ask_cpu(void)
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
static void init_vectors(struct kernel_table *table, unsigned cpu) { (void)table, (void)cpu; }
static unsigned ask_cpu(void) { return 0; }
#endif

void kernel_table_init(struct kernel_table *table, unsigned cpu)
{
    memset(table, 0, sizeof *table);
    FAMILIES(INIT, scalar)
    init_vectors(table, cpu);
    if (table->streamed_copy && !(cpu & CPU_INTEL))
        table->long_copy = table->streamed_copy;
}

// Set once, when the library is loaded: in a virtual machine CPUID takes as long as a small collective.
static unsigned features;
static struct kernel_table best;

unsigned cpu_features(void) { return features; }

const struct kernel_table *kernel_table_best(void) { return &best; }

__attribute__((constructor)) static void set_best(void)
{
    features = ask_cpu();
    kernel_table_init(&best, features);
}

const char *bhvd_cpu_features(void)
{
    return features & CPU_AVX512 ? "avx512" : features & CPU_AVX2 ? "avx2" : "scalar";
}

// Volatile, lest link-time optimization copies the characters into code: a test changes them in the library's file to make another
// release.
#define TEXT_OF(value) #value
#define TEXT(value) TEXT_OF(value)
static const char *const volatile version = TEXT(BHVD_VERSION);

const char *bhvd_version(void) { return version; }

// ------------------------------------------------------------------------------------------------------------- codecs

static const struct bhvd_codec_options defaults;

// The codec's kernels for this dtype; sets *options to the defaults if NULL. NULL: the codec does not support the dtype.
static const struct kernel_codec *codec_find(bhvd_codec codec, bhvd_dtype dtype, const struct bhvd_codec_options **options)
{
    if ((int)codec < 0 || codec >= BHVD_CODEC_COUNT || !dtype_is_valid(dtype))
        return NULL;
    if (!*options)
        *options = &defaults;
    const struct kernel_codec *kernels = &kernel_table_best()->codecs[codec][dtype];
    return kernels->encoded_size ? kernels : NULL;
}

size_t bhvd_encoded_size(bhvd_codec codec, bhvd_dtype dtype, size_t count, const struct bhvd_codec_options *options)
{
    const struct kernel_codec *kernels = codec_find(codec, dtype, &options);
    return kernels ? kernels->encoded_size(dtype, count, options) : 0;
}

// Finds the kernels for encoding, or for decoding src if it is not NULL.
static bhvd_status check(bhvd_codec codec, bhvd_dtype dtype, const void *src, size_t count,
                         const struct bhvd_codec_options **options, const struct kernel_codec **kernels)
{
    *kernels = codec_find(codec, dtype, options);
    if (!*kernels)
        return BHVD_ERR_UNSUPPORTED;
    if (src && (*kernels)->version && ((const uint8_t *)src)[CODEC_VERSION_AT] != (*kernels)->version)
        return BHVD_ERR_ARGUMENT;
    return count > 0 && (*kernels)->encoded_size(dtype, count, *options) == 0 ? BHVD_ERR_ARGUMENT : BHVD_OK;
}

bhvd_status bhvd_encode(bhvd_codec codec, bhvd_dtype dtype, void *dst, const void *src, size_t count,
                        const struct bhvd_codec_options *options)
{
    const struct kernel_codec *kernels;
    const bhvd_status status = check(codec, dtype, NULL, count, &options, &kernels);
    if (status == BHVD_OK)
        kernels->encode(dst, src, count, options);
    return status;
}

bhvd_status bhvd_decode(bhvd_codec codec, bhvd_dtype dtype, void *dst, const void *src, size_t count,
                        const struct bhvd_codec_options *options)
{
    const struct kernel_codec *kernels;
    const bhvd_status status = check(codec, dtype, src, count, &options, &kernels);
    if (status == BHVD_OK)
        kernels->decode(dst, src, count, options);
    return status;
}

bhvd_status bhvd_decode_add(bhvd_codec codec, bhvd_dtype dtype, float *dst, const void *src, size_t count,
                            const struct bhvd_codec_options *options)
{
    const struct kernel_codec *kernels;
    const bhvd_status status = check(codec, dtype, src, count, &options, &kernels);
    if (status == BHVD_OK)
        kernels->decode_add(dst, src, count, options);
    return status;
}
