// Shared by the kernel tests: difficult inputs, memory that detects accesses out of bounds, and descriptions of a setting.
// Sources end at the end of their allocation, so that AddressSanitizer detects reads past the end; writes past the end hit
// guard bytes.
#pragma once

#include <float.h>
#include <math.h>

#include "base/dtype.h"
#include "check.h"
#include "kernel/element.h"
#include "kernel/kernel.h"

enum { GUARD = 64, GUARD_BYTE = 0xA5 };

// CHECK with a sentence about the input.
#define EXPECT(condition, ...)                               \
    do {                                                     \
        if (!(condition))                                    \
            check_fail(__FILE__, __LINE__, __VA_ARGS__);     \
    } while (0)

static const size_t counts[] = {0, 1, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 255, 1000, 4097};
enum { COUNTS = sizeof counts / sizeof counts[0] };

static uint64_t random_state = 88172645463325252u;

static uint64_t random_bits(void)
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    return random_state ^= random_state << 17;
}

static void store(int dtype, void *p, double x)
{
    switch (dtype) {
    case BHVD_FLOAT16: store_f16(p, (float)x); break;
    case BHVD_BFLOAT16: store_bf16(p, (float)x); break;
    case BHVD_FLOAT32: store_f32(p, (float)x); break;
    default: store_f64(p, x); break;
    }
}

// ORDINARY: floats in [-1, 1). SPECIAL: mostly special values. ANY_BITS: random bytes.
// TINY: subnormals and their neighbors. HUGE_RANGE: both ends of the type. CONSTANT: all the same.
enum fill { ORDINARY, SPECIAL, ANY_BITS, TINY, HUGE_RANGE, CONSTANT, FILLS };

static double fill_value(int dtype, enum fill fill, size_t i)
{
    static const double specials[] = {
        0.0, -0.0, 1, -1, INFINITY, -INFINITY, NAN, -NAN, FLT_MAX, -FLT_MAX, DBL_MAX, FLT_MIN, 0x1p-149, -0x1p-149,
        0x1p-1074, 65504, -65504, 65520, 0x1p-24, 0x1p-25, 3.3895314e38,
    };
    const double unit = (double)(int64_t)random_bits() * 0x1p-63;
    const double limit = dtype == BHVD_FLOAT16 ? 65504 : dtype == BHVD_BFLOAT16 ? 0x1.fep127
                       : dtype == BHVD_FLOAT32 ? FLT_MAX : DBL_MAX;
    switch (fill) {
    case SPECIAL: return specials[random_bits() % (sizeof specials / sizeof specials[0])];
    case TINY: return unit * (dtype == BHVD_FLOAT16 ? 0x1p-20 : dtype == BHVD_FLOAT64 ? 0x1p-1060 : 0x1p-130);
    case HUGE_RANGE: return i % 3 == 0 ? limit : i % 3 == 1 ? -limit : unit * limit;
    case CONSTANT: return -0.75;
    default: return unit;
    }
}

static void fill_elements(int dtype, enum fill fill, void *data, size_t count)
{
    const size_t size = bhvd_dtype_size((bhvd_dtype)dtype);
    for (size_t i = 0; i < count; i++) {
        char *p = (char *)data + i * size;
        const uint64_t bits = random_bits();
        if (dtype_is_floating(dtype) && fill != ANY_BITS)
            store(dtype, p, fill_value(dtype, fill, i));
        else if (fill == SPECIAL) {                             // 0, -1 and the limits of every integer type
            memset(p, bits % 2 == 0 ? 0xff : 0, size);
            p[size - 1] ^= bits % 3 == 0 ? (char)0x80 : 0;
        }
        else if (fill == CONSTANT)
            memset(p, 1, size);
        else
            memcpy(p, &bits, size);
    }
}

// `nbytes` bytes that end with the allocation and start at an address with this remainder.
struct source {
    char *memory, *data;
};

static struct source source_create(size_t nbytes, size_t offset)
{
    struct source source;
    source.memory = malloc(offset + nbytes + !(offset + nbytes));
    source.data = source.memory + offset;
    return source;
}

// `nbytes` bytes with guards on both sides, for results; the address is a multiple of GUARD, plus `offset`.
struct result {
    unsigned char *memory, *data;
    size_t nbytes;
};

static struct result result_create(size_t nbytes, size_t offset)
{
    const size_t size = (nbytes + offset + 3 * GUARD - 1) / GUARD * GUARD;
    struct result result = {aligned_alloc(GUARD, size), NULL, nbytes};
    memset(result.memory, GUARD_BYTE, size);
    result.data = result.memory + GUARD + offset;
    return result;
}

static int result_guards_hold(const struct result *result)
{
    for (const unsigned char *p = result->memory; p < result->data; p++)
        if (*p != GUARD_BYTE)
            return 0;
    for (size_t i = 0; i < GUARD; i++)
        if (result->data[result->nbytes + i] != GUARD_BYTE)
            return 0;
    return 1;
}

// Bit for bit; with any_nan all NaNs are equal (the processor decides which operand's payload a sum has).
static int same_elements(int dtype, const void *a, const void *b, size_t count, int any_nan)
{
    const size_t size = bhvd_dtype_size((bhvd_dtype)dtype);
    if (count == 0 || memcmp(a, b, count * size) == 0)
        return 1;
    for (size_t i = 0; any_nan && i < count; i++) {
        const char *x = (const char *)a + i * size, *y = (const char *)b + i * size;
        const int both_nan = dtype == BHVD_FLOAT32 ? isnan(load_f32(x)) && isnan(load_f32(y))
                           : dtype == BHVD_FLOAT64 ? isnan(load_f64(x)) && isnan(load_f64(y)) : 0;
        if (!both_nan && memcmp(x, y, size) != 0)
            return 0;
    }
    return any_nan;
}

struct setting {
    const struct kernel_table *table, *scalar;
    const char *isa;
    int dtype;
    enum fill fill;
    size_t count, offset;
};

// Describes the setting, for reports.
static const char *where(const struct setting *at)
{
    static char text[128];
    snprintf(text, sizeof text, "%s %s, fill %d, count %zu, offset %zu", at->isa,
             bhvd_dtype_name((bhvd_dtype)at->dtype), (int)at->fill, at->count, at->offset);
    return text;
}
