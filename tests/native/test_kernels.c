// Every entry of the kernel table, for every feature set of this CPU, against the scalar definitions; and these against
// hand-computed values. For codecs see test_codecs.c.
#include "kernel_inputs.h"

static void test_reduce(const struct setting *at)
{
    const size_t size = bhvd_dtype_size((bhvd_dtype)at->dtype), nbytes = at->count * size;
    struct source a = source_create(nbytes, at->offset), b = source_create(nbytes, at->offset * 2);
    fill_elements(at->dtype, at->fill, a.data, at->count);
    fill_elements(at->dtype, at->fill, b.data, at->count);
    for (int op = 0; op < KERNEL_REDUCTION_COUNT; op++) {
        const int any_nan = op == KERNEL_SUM || op == KERNEL_PRODUCT;
        struct result expected = result_create(nbytes, 0);
        at->scalar->reduce[op][at->dtype](expected.data, a.data, b.data, at->count);
        for (int place = 0; place < 3; place++) {               // separate, dst == a, dst == b
            struct result dst = result_create(nbytes, at->offset * 3);
            if (place > 0 && nbytes > 0)
                memcpy(dst.data, place == 1 ? a.data : b.data, nbytes);
            at->table->reduce[op][at->dtype](dst.data, place == 1 ? (void *)dst.data : a.data,
                                             place == 2 ? (void *)dst.data : b.data, at->count);
            EXPECT(same_elements(at->dtype, dst.data, expected.data, at->count, any_nan), "reduction %d, place %d, %s",
                  op, place, where(at));
            EXPECT(result_guards_hold(&dst), "reduction %d, %s", op, where(at));
            free(dst.memory);
        }
        free(expected.memory);
    }
    free(a.memory);
    free(b.memory);
}

static void test_copy(const struct setting *at)
{
    const kernel_copy_fn copies[] = {at->table->long_copy, at->table->streamed_copy};
    const size_t nbytes = at->count * bhvd_dtype_size((bhvd_dtype)at->dtype);
    struct source src = source_create(nbytes, at->offset);
    fill_elements(at->dtype, at->fill, src.data, at->count);
    for (size_t i = 0; i < sizeof copies / sizeof *copies; i++) {
        struct result dst = result_create(nbytes, at->offset * 3);
        if (copies[i])
            copies[i](dst.data, src.data, nbytes);
        EXPECT(!copies[i] || nbytes == 0 || memcmp(dst.data, src.data, nbytes) == 0, "copy %zu, %s", i, where(at));
        EXPECT(result_guards_hold(&dst), "copy %zu, %s", i, where(at));
        free(dst.memory);
    }
    free(src.memory);
}

static void test_scale(const struct setting *at)
{
    static const double factors[] = {1, 0.5, 1.0 / 3, -2, 0, 1e30, INFINITY};
    const size_t nbytes = at->count * bhvd_dtype_size((bhvd_dtype)at->dtype);
    struct source src = source_create(nbytes, at->offset);
    fill_elements(at->dtype, at->fill, src.data, at->count);
    for (size_t f = 0; f < sizeof factors / sizeof factors[0]; f++) {
        struct result expected = result_create(nbytes, 0), dst = result_create(nbytes, at->offset * 3);
        at->scalar->scale[at->dtype](expected.data, src.data, factors[f], at->count);
        at->table->scale[at->dtype](dst.data, src.data, factors[f], at->count);
        EXPECT(same_elements(at->dtype, dst.data, expected.data, at->count, 1), "scale by %g, %s",
              factors[f], where(at));
        if (nbytes > 0)
            memcpy(dst.data, src.data, nbytes);
        at->table->scale[at->dtype](dst.data, dst.data, factors[f], at->count);
        EXPECT(same_elements(at->dtype, dst.data, expected.data, at->count, 1), "scale by %g in place, %s",
              factors[f], where(at));
        EXPECT(result_guards_hold(&dst), "scale, %s", where(at));
        free(expected.memory);
        free(dst.memory);
    }
    free(src.memory);
}

static void test_cast(const struct setting *at)
{
    if (!dtype_is_floating(at->dtype)) {
        EXPECT(!at->table->to_float[at->dtype] && !at->table->from_float[at->dtype], "%s", where(at));
        return;
    }
    const size_t size = bhvd_dtype_size((bhvd_dtype)at->dtype), count = at->count;
    struct source src = source_create(count * size, at->offset), floats = source_create(count * 4, at->offset);
    fill_elements(at->dtype, at->fill, src.data, count);
    fill_elements(BHVD_FLOAT32, at->fill, floats.data, count);
    struct result wide = result_create(count * 4, at->offset), wide_expected = result_create(count * 4, 0);
    struct result narrow = result_create(count * size, at->offset), narrow_expected = result_create(count * size, 0);
    at->scalar->to_float[at->dtype]((float *)wide_expected.data, src.data, count);
    at->table->to_float[at->dtype]((void *)wide.data, src.data, count);
    at->scalar->from_float[at->dtype](narrow_expected.data, (void *)floats.data, count);
    at->table->from_float[at->dtype](narrow.data, (void *)floats.data, count);
    EXPECT(same_elements(BHVD_FLOAT32, wide.data, wide_expected.data, count, 0), "to_float, %s", where(at));
    EXPECT(same_elements(at->dtype, narrow.data, narrow_expected.data, count, 0), "from_float, %s", where(at));
    EXPECT(result_guards_hold(&wide) && result_guards_hold(&narrow), "%s", where(at));
    free(src.memory), free(floats.memory);
    free(wide.memory), free(wide_expected.memory), free(narrow.memory), free(narrow_expected.memory);
}

// All three passes, over vectors and over the remainder after the last vector: both loops come from the same source.
static void test_adam(const struct setting *at)
{
    static const struct bhvd_adam by = {0.9, 0.3, 1e-8, 0.8, 0.5, 0.1, 0.25};
    const size_t nbytes = at->count * bhvd_dtype_size((bhvd_dtype)at->dtype);
    struct source in[4];
    const struct kernel_adam *const kernels[] = {&at->scalar->adam[at->dtype], &at->table->adam[at->dtype]};
    struct result out[2][2];
    for (int i = 0; i < 4; i++) {
        in[i] = source_create(nbytes, at->offset * (size_t)i);
        fill_elements(at->dtype, at->fill, in[i].data, at->count);
    }
    for (int pass = 0; pass < 8; pass++) {
        const bool in_steps = pass & 1;
        const struct bhvd_adam_variance shared = {0.99, in_steps ? 0.25 : 0, 0.25, 0.03, 3};
        for (int k = 0; k < 2; k++) {
            const size_t offset = k ? at->offset * 3 : 0;
            out[k][0] = result_create(nbytes, offset);
            out[k][1] = result_create(nbytes, offset);
            if (pass < 4)
                kernels[k]->momentum(out[k][0].data, in[0].data, in[1].data, in[2].data, pass & 2 ? in[3].data : NULL, &by,
                                    in_steps, at->count);
            else if (pass < 6)
                kernels[k]->step(out[k][0].data, out[k][1].data, in[0].data, in[2].data, in[3].data, &by, in_steps, at->count);
            else if (nbytes > 0) {
                struct source own = source_create(nbytes, at->offset);
                memcpy(out[k][1].data, in[2].data, nbytes);
                memcpy(own.data, in[3].data, nbytes);
                kernels[k]->variance(out[k][0].data, out[k][1].data, own.data, in[1].data, &shared, at->count);
                free(own.memory);
            }
        }
        for (int i = 0; i < 2; i++) {
            EXPECT(same_elements(at->dtype, out[1][i].data, out[0][i].data, at->count, 1), "pass %d, result %d, %s", pass, i,
                   where(at));
            EXPECT(result_guards_hold(&out[0][i]) && result_guards_hold(&out[1][i]), "pass %d, %s", pass, where(at));
            free(out[0][i].memory), free(out[1][i].memory);
        }
    }
    for (int i = 0; i < 4; i++)
        free(in[i].memory);
}

static void test_against_scalar(const char *isa, unsigned cpu)
{
    struct kernel_table scalar, table;
    kernel_table_init(&scalar, 0);
    kernel_table_init(&table, cpu);
    struct setting at = {&table, &scalar, isa, 0, ORDINARY, 0, 0};
    for (at.dtype = 0; at.dtype < BHVD_DTYPE_COUNT; at.dtype++)
        for (at.fill = 0; at.fill < FILLS; at.fill++)
            for (size_t c = 0; c < COUNTS; c++)
                for (at.offset = 0; at.offset < 4; at.offset += at.offset + 1) {     // 0, 1, 3
                    at.count = counts[c];
                    test_copy(&at);
                    test_reduce(&at);
                    test_scale(&at);
                    test_cast(&at);
                    if (at.dtype == BHVD_FLOAT32 || at.dtype == BHVD_FLOAT64)
                        test_adam(&at);
                }
}

// A kernel's result for one pair of elements.
#define REDUCE_CHECK(op, dtype, type, x, y, expected)                                                   \
    do {                                                                                                \
        const type a = (type)(x), b = (type)(y), want = (type)(expected);                               \
        type got;                                                                                       \
        scalar.reduce[op][dtype](&got, &a, &b, 1);                                                      \
        EXPECT(memcmp(&got, &want, sizeof got) == 0, "%s " #op " of " #x " and " #y, bhvd_dtype_name(dtype)); \
    } while (0)

#define SCALE_CHECK(dtype, type, x, factor, expected)                                                   \
    do {                                                                                                \
        const type a = (type)(x), want = (type)(expected);                                              \
        type got;                                                                                       \
        scalar.scale[dtype](&got, &a, factor, 1);                                                       \
        EXPECT(memcmp(&got, &want, sizeof got) == 0, "%s " #x " times " #factor, bhvd_dtype_name(dtype)); \
    } while (0)

TEST(definitions)
{
    struct kernel_table scalar;
    kernel_table_init(&scalar, 0);
    for (int dtype = 0; dtype < BHVD_DTYPE_COUNT; dtype++) {
        EXPECT(scalar.scale[dtype] != NULL, "%s", bhvd_dtype_name((bhvd_dtype)dtype));
        for (int op = 0; op < KERNEL_REDUCTION_COUNT; op++)
            EXPECT(scalar.reduce[op][dtype] != NULL, "%s", bhvd_dtype_name((bhvd_dtype)dtype));
    }
    // Means of whole numbers are whole for any number of ranks: 49 * (1. / 49) < 1.
    for (int n = 2; n < 5000; n++) {
        SCALE_CHECK(BHVD_INT32, int32_t, n, 1.0 / n, 1);
        SCALE_CHECK(BHVD_INT32, int32_t, -7 * n - 1, 1.0 / n, -7);
        SCALE_CHECK(BHVD_INT64, int64_t, INT64_C(1000000000001) * n, 1.0 / n, INT64_C(1000000000001));
        SCALE_CHECK(BHVD_UINT16, uint16_t, n, 1.0 / n, 1);
    }
    SCALE_CHECK(BHVD_UINT8, uint8_t, 49, 1.0 / 49, 1);
    SCALE_CHECK(BHVD_INT8, int8_t, -98, 1.0 / 49, -2);
    SCALE_CHECK(BHVD_INT16, int16_t, 98, 1.0 / 49, 2);
    REDUCE_CHECK(KERNEL_SUM, BHVD_UINT8, uint8_t, 255, 1, 0);
    REDUCE_CHECK(KERNEL_SUM, BHVD_INT8, int8_t, 127, 1, -128);
    REDUCE_CHECK(KERNEL_SUM, BHVD_INT32, int32_t, INT32_MAX, 1, INT32_MIN);
    REDUCE_CHECK(KERNEL_SUM, BHVD_INT64, int64_t, INT64_MAX, 1, INT64_MIN);
    REDUCE_CHECK(KERNEL_PRODUCT, BHVD_UINT16, uint16_t, 65535, 65535, 1);
    REDUCE_CHECK(KERNEL_PRODUCT, BHVD_INT16, int16_t, -3, 7, -21);
    REDUCE_CHECK(KERNEL_PRODUCT, BHVD_INT64, int64_t, -3, 7, -21);
    REDUCE_CHECK(KERNEL_MIN, BHVD_INT8, int8_t, -128, 127, -128);
    REDUCE_CHECK(KERNEL_MIN, BHVD_UINT8, uint8_t, 128, 127, 127);
    REDUCE_CHECK(KERNEL_MAX, BHVD_UINT16, uint16_t, 65535, 1, 65535);
    REDUCE_CHECK(KERNEL_MAX, BHVD_INT64, int64_t, INT64_MIN, -1, -1);
    REDUCE_CHECK(KERNEL_SUM, BHVD_BOOL, uint8_t, 1, 1, 1);
    REDUCE_CHECK(KERNEL_SUM, BHVD_BOOL, uint8_t, 4, 2, 1);
    REDUCE_CHECK(KERNEL_PRODUCT, BHVD_BOOL, uint8_t, 4, 2, 1);
    REDUCE_CHECK(KERNEL_MIN, BHVD_BOOL, uint8_t, 1, 0, 0);
    REDUCE_CHECK(KERNEL_MAX, BHVD_BOOL, uint8_t, 0, 0, 0);
    REDUCE_CHECK(KERNEL_SUM, BHVD_FLOAT32, float, 1.5, 2.25, 3.75);
    REDUCE_CHECK(KERNEL_PRODUCT, BHVD_FLOAT64, double, 1.5, -2, -3);
    REDUCE_CHECK(KERNEL_SUM, BHVD_FLOAT64, double, 1.5, 2.25, 3.75);
    REDUCE_CHECK(KERNEL_PRODUCT, BHVD_FLOAT32, float, 1.5, -2, -3);
    REDUCE_CHECK(KERNEL_SUM, BHVD_UINT16, uint16_t, 65535, 2, 1);
    REDUCE_CHECK(KERNEL_SUM, BHVD_INT16, int16_t, -7, 2, -5);
    REDUCE_CHECK(KERNEL_PRODUCT, BHVD_UINT8, uint8_t, 16, 17, 16);
    REDUCE_CHECK(KERNEL_PRODUCT, BHVD_INT8, int8_t, -3, 7, -21);
    REDUCE_CHECK(KERNEL_PRODUCT, BHVD_INT32, int32_t, -3, 7, -21);
    REDUCE_CHECK(KERNEL_PRODUCT, BHVD_FLOAT16, uint16_t, 0x4000, 0x4200, 0x4600);
    REDUCE_CHECK(KERNEL_PRODUCT, BHVD_BFLOAT16, uint16_t, 0x4000, 0x4040, 0x40c0);
    REDUCE_CHECK(KERNEL_MIN, BHVD_INT16, int16_t, -7, 2, -7);
    REDUCE_CHECK(KERNEL_MIN, BHVD_INT32, int32_t, -7, 2, -7);
    REDUCE_CHECK(KERNEL_MIN, BHVD_INT64, int64_t, -7, 2, -7);
    REDUCE_CHECK(KERNEL_MIN, BHVD_UINT16, uint16_t, 7, 65535, 7);
    REDUCE_CHECK(KERNEL_MAX, BHVD_UINT8, uint8_t, 7, 255, 255);
    REDUCE_CHECK(KERNEL_MAX, BHVD_INT8, int8_t, -7, 2, 2);
    REDUCE_CHECK(KERNEL_MAX, BHVD_INT16, int16_t, -7, 2, 2);
    REDUCE_CHECK(KERNEL_MAX, BHVD_INT32, int32_t, -7, 2, 2);
    REDUCE_CHECK(KERNEL_MIN, BHVD_FLOAT64, double, -7, 2, -7);
    REDUCE_CHECK(KERNEL_MIN, BHVD_FLOAT32, float, NAN, 1, NAN);
    REDUCE_CHECK(KERNEL_MIN, BHVD_FLOAT32, float, 1, -NAN, NAN);
    REDUCE_CHECK(KERNEL_MAX, BHVD_FLOAT64, double, INFINITY, -NAN, NAN);
    REDUCE_CHECK(KERNEL_MAX, BHVD_FLOAT32, float, -INFINITY, -1, -1);
    REDUCE_CHECK(KERNEL_SUM, BHVD_FLOAT16, uint16_t, 0x3c00, 0x4000, 0x4200);       // 1 + 2
    REDUCE_CHECK(KERNEL_SUM, BHVD_FLOAT16, uint16_t, 0x7bff, 0x7bff, 0x7c00);       // overflow
    REDUCE_CHECK(KERNEL_SUM, BHVD_FLOAT16, uint16_t, 0x6800, 0x3c00, 0x6800);       // 2048 + 1: tie, to even
    REDUCE_CHECK(KERNEL_SUM, BHVD_FLOAT16, uint16_t, 0x7c00, 0xfc00, 0x7e00);       // inf - inf
    REDUCE_CHECK(KERNEL_MIN, BHVD_FLOAT16, uint16_t, 0xfd01, 0x3c00, 0x7e00);
    REDUCE_CHECK(KERNEL_SUM, BHVD_BFLOAT16, uint16_t, 0x3f80, 0x4000, 0x4040);
    REDUCE_CHECK(KERNEL_SUM, BHVD_BFLOAT16, uint16_t, 0x4380, 0x3f80, 0x4380);      // 256 + 1: tie, to even
    REDUCE_CHECK(KERNEL_MAX, BHVD_BFLOAT16, uint16_t, 0xff81, 0x3f80, 0x7fc0);

    SCALE_CHECK(BHVD_INT32, int32_t, 7, -0.5, -3);
    SCALE_CHECK(BHVD_INT32, int32_t, INT32_MAX, 2.0, INT32_MAX);
    SCALE_CHECK(BHVD_INT32, int32_t, INT32_MAX, -2.0, INT32_MIN);
    SCALE_CHECK(BHVD_INT64, int64_t, INT64_MAX, 1.0, INT64_MAX);
    SCALE_CHECK(BHVD_INT64, int64_t, INT64_MIN, 2.0, INT64_MIN);
    SCALE_CHECK(BHVD_INT64, int64_t, 0, INFINITY, 0);
    SCALE_CHECK(BHVD_UINT8, uint8_t, 200, 2.0, 255);
    SCALE_CHECK(BHVD_UINT8, uint8_t, 200, -2.0, 0);
    SCALE_CHECK(BHVD_INT8, int8_t, 0, (double)NAN, 0);
    SCALE_CHECK(BHVD_BOOL, uint8_t, 1, 0.0, 1);
    SCALE_CHECK(BHVD_FLOAT32, float, 3, 0.1, 3 * 0.1f);
    SCALE_CHECK(BHVD_FLOAT64, double, 3, 0.1, 3 * 0.1);
    SCALE_CHECK(BHVD_FLOAT16, uint16_t, 0x3c00, 0.5, 0x3800);
    SCALE_CHECK(BHVD_BFLOAT16, uint16_t, 0x3f80, 0.5, 0x3f00);
}

TEST(half_conversions)
{
    static const struct {
        float value;
        uint16_t f16, bf16;
    } known[] = {
        {0.0f, 0x0000, 0x0000}, {-0.0f, 0x8000, 0x8000}, {1.0f, 0x3c00, 0x3f80}, {-2.0f, 0xc000, 0xc000},
        {65504.0f, 0x7bff, 0x4780}, {65519.996f, 0x7bff, 0x4780}, {65520.0f, 0x7c00, 0x4780},
        {0x1p-14f, 0x0400, 0x3880}, {0x1p-24f, 0x0001, 0x3380}, {0x1p-25f, 0x0000, 0x3300},
        {0x1.000002p-25f, 0x0001, 0x3300}, {0x1.8p-24f, 0x0002, 0x33c0}, {0x1.ffcp-15f, 0x0400, 0x3880},
        {INFINITY, 0x7c00, 0x7f80}, {-INFINITY, 0xfc00, 0xff80}, {FLT_MAX, 0x7c00, 0x7f80},
        {1.00390625f, 0x3c04, 0x3f80}, {1.01171875f, 0x3c0c, 0x3f82}, {0x1p-149f, 0x0000, 0x0000},
    };
    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++) {
        EXPECT(float16_from_float(known[i].value) == known[i].f16, "%a", known[i].value);
        EXPECT(bfloat16_from_float(known[i].value) == known[i].bf16, "%a", known[i].value);
    }
    EXPECT(float16_from_float(float_from_bits(0x7f802000)) == 0x7e01, "a signalling NaN becomes quiet, payload kept");
    EXPECT(float16_from_float(float_from_bits(0xff800001)) == 0xfe00, "a NaN never becomes an infinity");
    EXPECT(bfloat16_from_float(float_from_bits(0xff800001)) == 0xffc0, "a NaN never becomes an infinity");
    EXPECT(bits_from_float(float16_to_float(0xfd01)) == 0xffe02000, "a signalling NaN becomes quiet");
    for (uint32_t h = 0; h < 0x10000; h++) {        // every number survives the conversion and back
        const uint16_t half = (uint16_t)h;
        if ((h & 0x7fff) <= 0x7c00)
            EXPECT(float16_from_float(float16_to_float(half)) == half, "float16 %04x", h);
        if ((h & 0x7fff) <= 0x7f80)
            EXPECT(bfloat16_from_float(bfloat16_to_float(half)) == half, "bfloat16 %04x", h);
    }
}

TEST(facts)
{
    EXPECT(bhvd_dtype_size(BHVD_BFLOAT16) == 2 && bhvd_dtype_size(BHVD_FLOAT64) == 8, "sizes");
    EXPECT(bhvd_dtype_size((bhvd_dtype)-1) == 0 && bhvd_dtype_size(BHVD_DTYPE_COUNT) == 0, "no such type");
    EXPECT(strcmp(bhvd_dtype_name(BHVD_BOOL), "bool") == 0, "%s", bhvd_dtype_name(BHVD_BOOL));
}

// Longer than in the other tests: several pages and parts of pages, with each CPU vendor's implementation.
TEST(long_copies)
{
    static const struct {
        const char *isa;
        unsigned cpu;
    } ways[] = {{"scalar", 0}, {"avx2", CPU_AVX2}, {"avx2 of Intel", CPU_AVX2 | CPU_INTEL}};
    static const size_t sizes[] = {4095, 16383, 16384, 16385 + 63, 2 * 16384 + 64, 100001};
    for (size_t w = 0; w < sizeof ways / sizeof ways[0]; w++) {
        struct kernel_table table;
        if ((ways[w].cpu & CPU_AVX2) && !(cpu_features() & CPU_AVX2))
            continue;
        kernel_table_init(&table, ways[w].cpu);
        struct setting at = {&table, NULL, ways[w].isa, BHVD_UINT8, ANY_BITS, 0, 0};
        for (size_t n = 0; n < sizeof sizes / sizeof sizes[0]; n++) {
            at.count = sizes[n];
            for (at.offset = 0; at.offset <= 21; at.offset += 7)      // results begin at 0, 21, 42, 63
                test_copy(&at);
        }
    }
}

// The table's scalar kernels against themselves: in place, guard bytes, sanitizers.
TEST(scalar)
{
    test_against_scalar("scalar", 0);
}

TEST(avx2)
{
    if (cpu_features() & CPU_AVX2)
        test_against_scalar("avx2", CPU_AVX2);
    else
        printf(" not on this CPU,");
}

TEST(avx512)
{
    if (cpu_features() & CPU_AVX512)
        test_against_scalar("avx512", CPU_AVX2 | CPU_AVX512);
    else
        printf(" not on this CPU,");
}
