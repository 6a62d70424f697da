// Every codec of the kernel table, for every feature set of this CPU, against its scalar definition, bit for bit; and decoding of
// any bytes. tests/kernels tests the definitions themselves.
#include "kernel_inputs.h"

// More elements than the count from which results bypass the caches.
enum { LARGE = (4 << 20) + 5 };

static const struct case_of_codec {
    const char *name;
    bhvd_codec codec;
    struct bhvd_codec_options options;
} cases[] = {
    {"minmax_uint8", BHVD_CODEC_MINMAX_UINT8, {0, 0}}, {"sign", BHVD_CODEC_SIGN, {0, 0}},
    {"sign_rms", BHVD_CODEC_SIGN_RMS, {0, 0}},
    {"float16", BHVD_CODEC_FLOAT16, {0, 0}},
    {"bfloat16", BHVD_CODEC_BFLOAT16, {0, 0}},         {"topk", BHVD_CODEC_TOPK, {0, 0}},
    {"topk 0.3", BHVD_CODEC_TOPK, {0.3, 0}},           {"topk 1", BHVD_CODEC_TOPK, {1, 0}},
    {"block8", BHVD_CODEC_BLOCK8, {0, 0}},             {"block8 at random", BHVD_CODEC_BLOCK8, {64, 7, 1}},
    {"block4", BHVD_CODEC_BLOCK4, {0, 0}},             {"block4 at random", BHVD_CODEC_BLOCK4, {512, 7, 1}},
    {"topk_2bit", BHVD_CODEC_TOPK_2BIT, {0, 0}},       {"topk_2bit 0.3", BHVD_CODEC_TOPK_2BIT, {0.3, 0}},
    {"topk_2bit 1", BHVD_CODEC_TOPK_2BIT, {1, 0}},
    {"rotated1", BHVD_CODEC_ROTATED1, {0, 7}},         {"rotated2", BHVD_CODEC_ROTATED2, {0, 7}},
    {"rotated3", BHVD_CODEC_ROTATED3, {256, 7}},       {"rotated4", BHVD_CODEC_ROTATED4, {2048, UINT64_MAX}},
    {"rotated1 256", BHVD_CODEC_ROTATED1, {256, 0}},   {"rotated2 1024", BHVD_CODEC_ROTATED2, {1024, 7}},
    {"float8", BHVD_CODEC_FLOAT8, {0, 0}},             {"float8 of 128", BHVD_CODEC_FLOAT8, {128, 0}},
};
enum { CASES = sizeof cases / sizeof cases[0] };

// Decodes the bytes with the definition and with the table's kernels, by decode and decode_add.
static void test_decoding(const struct setting *at, const struct case_of_codec *of, const void *bytes, size_t nbytes)
{
    const struct kernel_codec *codec = &at->table->codecs[of->codec][at->dtype];
    const struct kernel_codec *scalar = &at->scalar->codecs[of->codec][at->dtype];
    const size_t size = bhvd_dtype_size((bhvd_dtype)at->dtype), count = at->count;
    struct source codes = source_create(nbytes, at->offset);
    if (nbytes > 0)
        memcpy(codes.data, bytes, nbytes);
    struct result expected = result_create(count * size, 0), decoded = result_create(count * size, at->offset);
    scalar->decode(expected.data, codes.data, count, &of->options);
    codec->decode(decoded.data, codes.data, count, &of->options);
    EXPECT(same_elements(at->dtype, decoded.data, expected.data, count, 0), "decode, %s, %s", of->name, where(at));
    EXPECT(result_guards_hold(&decoded) && result_guards_hold(&expected), "decode, %s, %s", of->name, where(at));

    struct result sum_expected = result_create(count * 4, 0), sum = result_create(count * 4, at->offset);
    fill_elements(BHVD_FLOAT32, ORDINARY, sum.data, count);
    if (count > 0)
        memcpy(sum_expected.data, sum.data, count * 4);
    scalar->decode_add((float *)sum_expected.data, codes.data, count, &of->options);
    codec->decode_add((void *)sum.data, codes.data, count, &of->options);
    EXPECT(same_elements(BHVD_FLOAT32, sum.data, sum_expected.data, count, 1), "decode_add, %s, %s", of->name,
           where(at));
    EXPECT(result_guards_hold(&sum) && result_guards_hold(&sum_expected), "decode_add, %s, %s", of->name, where(at));
    free(codes.memory), free(expected.memory), free(decoded.memory), free(sum_expected.memory), free(sum.memory);
}

// Adds the code's coefficients twice, once scaled, encodes them, and transforms them back.
static void test_transform(const struct setting *at, const struct case_of_codec *of, const void *code, size_t nbytes)
{
    const struct kernel_transform *transform = &at->table->codecs[of->codec][at->dtype].transform;
    const struct kernel_transform *scalar = &at->scalar->codecs[of->codec][at->dtype].transform;
    if (!scalar->encode)
        return;
    const size_t sums = scalar->count(at->count, &of->options), size = bhvd_dtype_size((bhvd_dtype)at->dtype);
    struct result expected = result_create(4 * sums, 0), sum = result_create(4 * sums, 4);
    struct result code_expected = result_create(nbytes, 0), encoded = result_create(nbytes, at->offset);
    struct result back_expected = result_create(at->count * size, 0), back = result_create(at->count * size, at->offset);
    for (int encodes = 0; encodes < 2; encodes++) {
        memset(expected.data, 0, 4 * sums), memset(sum.data, 0, 4 * sums);
        for (int i = 0; i < 2; i++) {
            scalar->add((float *)(void *)expected.data, code, at->count, &of->options);
            transform->add((float *)(void *)sum.data, code, at->count, &of->options);
        }
        at->scalar->scale[BHVD_FLOAT32](expected.data, expected.data, 0.3, sums);
        at->scalar->scale[BHVD_FLOAT32](sum.data, sum.data, 0.3, sums);
        EXPECT(same_elements(BHVD_FLOAT32, sum.data, expected.data, sums, 1), "add, %s, %s", of->name, where(at));
        EXPECT(result_guards_hold(&sum), "add, %s, %s", of->name, where(at));
        if (encodes) {
            scalar->encode(code_expected.data, (float *)(void *)expected.data, at->count, code, &of->options);
            transform->encode(encoded.data, (float *)(void *)sum.data, at->count, code, &of->options);
        } else {
            scalar->invert(back_expected.data, (float *)(void *)expected.data, at->count, code, &of->options);
            transform->invert(back.data, (float *)(void *)sum.data, at->count, code, &of->options);
        }
    }
    EXPECT(memcmp(encoded.data, code_expected.data, nbytes) == 0, "encode again, %s, %s", of->name, where(at));
    EXPECT(scalar->are_alike(encoded.data, code), "the key, %s, %s", of->name, where(at));
    EXPECT(same_elements(at->dtype, back.data, back_expected.data, at->count, 0), "invert, %s, %s", of->name, where(at));
    EXPECT(result_guards_hold(&encoded) && result_guards_hold(&back), "%s, %s", of->name, where(at));
    free(expected.memory), free(sum.memory), free(code_expected.memory), free(encoded.memory);
    free(back_expected.memory), free(back.memory);
}

// Like fill_elements, but a large source repeats its first elements.
static void fill_source(const struct setting *at, void *data)
{
    enum { DRAWN = 4099 };
    const size_t size = bhvd_dtype_size((bhvd_dtype)at->dtype);
    fill_elements(at->dtype, at->fill, data, at->count < DRAWN ? at->count : DRAWN);
    for (size_t i = DRAWN; i < at->count; i += DRAWN)
        memcpy((char *)data + i * size, data, (at->count - i < DRAWN ? at->count - i : DRAWN) * size);
}

static void test_codec(const struct setting *at, const struct case_of_codec *of)
{
    const struct kernel_codec *codec = &at->table->codecs[of->codec][at->dtype];
    const struct kernel_codec *scalar = &at->scalar->codecs[of->codec][at->dtype];
    if (!dtype_is_floating(at->dtype)) {
        EXPECT(!codec->encoded_size && !codec->encode && !codec->decode && !codec->decode_add, "%s, %s", of->name,
               where(at));
        return;
    }
    const size_t nbytes = codec->encoded_size((bhvd_dtype)at->dtype, at->count, &of->options);
    struct source src = source_create(at->count * bhvd_dtype_size((bhvd_dtype)at->dtype), at->offset);
    fill_source(at, src.data);
    struct result expected = result_create(nbytes, 0), encoded = result_create(nbytes, at->offset);
    scalar->encode(expected.data, src.data, at->count, &of->options);
    codec->encode(encoded.data, src.data, at->count, &of->options);
    EXPECT(memcmp(expected.data, encoded.data, nbytes) == 0, "encode, %s, %s", of->name, where(at));
    EXPECT(result_guards_hold(&encoded) && result_guards_hold(&expected), "encode, %s, %s", of->name, where(at));
    test_decoding(at, of, expected.data, nbytes);
    test_transform(at, of, expected.data, nbytes);
    free(src.memory), free(expected.memory), free(encoded.memory);
}

// Bytes that no encoder wrote; the sanitizers report errors. Skips minmax_uint8 with a NaN as one bound, which is undefined.
static void test_hostile(const struct setting *at, const struct case_of_codec *of)
{
    if (!dtype_is_floating(at->dtype) || of->codec == BHVD_CODEC_MINMAX_UINT8)
        return;
    const size_t nbytes = at->table->codecs[of->codec][at->dtype].encoded_size((bhvd_dtype)at->dtype, at->count,
                                                                                &of->options);
    unsigned char *bytes = malloc(nbytes + 1);
    for (size_t i = 0; i < nbytes; i++)
        bytes[i] = random_bits() % 4 == 0 ? 0xff : (unsigned char)random_bits();
    test_decoding(at, of, bytes, nbytes);
    test_transform(at, of, bytes, nbytes);
    free(bytes);
}

static void test_against_scalar(const char *isa, unsigned cpu)
{
    static struct kernel_table scalar, table;
    kernel_table_init(&scalar, 0);
    kernel_table_init(&table, cpu);
    struct setting at = {&table, &scalar, isa, 0, ORDINARY, 0, 0};
    for (size_t c = 0; c < CASES; c++) {
        for (at.dtype = 0; at.dtype < BHVD_DTYPE_COUNT; at.dtype++)
            for (at.fill = 0; at.fill < FILLS; at.fill++)
                for (size_t n = 0; n < COUNTS; n++)
                    for (at.offset = 0; at.offset < 4; at.offset += at.offset + 1) {     // 0, 1, 3
                        at.count = counts[n];
                        test_codec(&at, &cases[c]);
                        if (at.fill == ORDINARY)
                            test_hostile(&at, &cases[c]);
                    }
    }
}

// Chunks larger than any cache use other stores if their alignment allows it: not with an offset of 4.
TEST(large)
{
    static const unsigned features[] = {CPU_AVX2, CPU_AVX2 | CPU_AVX512};
    static const bhvd_codec codecs[] = {BHVD_CODEC_MINMAX_UINT8, BHVD_CODEC_SIGN, BHVD_CODEC_FLOAT16};
    static struct kernel_table table;
    for (size_t f = 0; f < sizeof features / sizeof features[0]; f++) {
        kernel_table_init(&table, features[f] & cpu_features());
        const struct setting at = {&table, &table, "large", BHVD_FLOAT32, ORDINARY, LARGE, 4};
        for (size_t c = 0; c < sizeof codecs / sizeof codecs[0]; c++) {
            const struct case_of_codec of = {"aligned or not", codecs[c], {0, 0}};
            test_codec(&at, &of);
        }
    }
}

// decode_add adds exactly the results of decode, for any element type.
TEST(decode_add_is_decode)
{
    enum { COUNT = 77 };
    static const int dtypes[] = {BHVD_FLOAT16, BHVD_BFLOAT16, BHVD_FLOAT32, BHVD_FLOAT64};
    static struct kernel_table table;
    kernel_table_init(&table, cpu_features());
    for (size_t c = 0; c < CASES; c++)
        for (size_t d = 0; d < sizeof dtypes / sizeof dtypes[0]; d++) {
            const struct kernel_codec *codec = &table.codecs[cases[c].codec][dtypes[d]];
            double elements[COUNT], decoded[COUNT];
            unsigned char codes[32 + COUNT * 12];
            float sum[COUNT] = {0}, expected[COUNT];
            fill_elements(dtypes[d], ORDINARY, elements, COUNT);
            codec->encode(codes, elements, COUNT, &cases[c].options);
            codec->decode(decoded, codes, COUNT, &cases[c].options);
            codec->decode_add(sum, codes, COUNT, &cases[c].options);
            table.to_float[dtypes[d]](expected, decoded, COUNT);
            for (int i = 0; i < COUNT; i++)
                EXPECT(sum[i] == expected[i], "%s, %s", cases[c].name, bhvd_dtype_name((bhvd_dtype)dtypes[d]));
        }
}

// The public functions, and the arguments that they reject.
TEST(public_functions)
{
    char bytes[256] = {0};
    float x = 1, sum = 2;
    const struct bhvd_codec_options whole = {1, 0}, wrong = {-1, 0}, nan = {NAN, 0}, odd = {96, 0};
    EXPECT(bhvd_encoded_size(BHVD_CODEC_MINMAX_UINT8, BHVD_FLOAT32, 33, NULL) == 32 + 64, "header and two blocks");
    EXPECT(bhvd_encoded_size(BHVD_CODEC_MINMAX_UINT8, BHVD_INT32, 33, NULL) == 0, "integers are not taken");
    EXPECT(bhvd_encoded_size(BHVD_CODEC_NONE, BHVD_FLOAT32, 33, NULL) == 0, "no codec");
    EXPECT(bhvd_encoded_size(BHVD_CODEC_COUNT, BHVD_FLOAT32, 33, NULL) == 0, "no such codec");
    EXPECT(bhvd_encoded_size(BHVD_CODEC_SIGN, BHVD_DTYPE_COUNT, 33, NULL) == 0, "no such type");
    EXPECT(bhvd_encoded_size(BHVD_CODEC_SIGN, BHVD_FLOAT32, 257, NULL) == 32 + 64, "header and two blocks of bits");
    EXPECT(bhvd_encoded_size(BHVD_CODEC_FLOAT16, BHVD_FLOAT32, 33, NULL) == 66, "elements");
    EXPECT(bhvd_encoded_size(BHVD_CODEC_TOPK, BHVD_FLOAT16, 101, NULL) == 32 + 2 * 6, "header and two pairs");
    EXPECT(bhvd_encoded_size(BHVD_CODEC_TOPK, BHVD_FLOAT32, 3, &whole) == 32 + 3 * 8, "header and three pairs");
    EXPECT(bhvd_encoded_size(BHVD_CODEC_TOPK, BHVD_FLOAT32, 3, &wrong) == 0, "a negative share");
    EXPECT(bhvd_encoded_size(BHVD_CODEC_TOPK, BHVD_FLOAT32, 3, &nan) == 0, "no share");
    EXPECT(bhvd_encoded_size(BHVD_CODEC_TOPK, BHVD_FLOAT32, (size_t)1 << 32, NULL) == 0, "too many elements");
    EXPECT(bhvd_encoded_size(BHVD_CODEC_TOPK_2BIT, BHVD_FLOAT16, 101, NULL) == 32 + 1 + 2 + 1, "header, indices, codes");
    EXPECT(bhvd_encoded_size(BHVD_CODEC_TOPK_2BIT, BHVD_FLOAT32, 3, &whole) == 32 + 1 + 0 + 1, "header, bits, codes");
    EXPECT(bhvd_encoded_size(BHVD_CODEC_TOPK_2BIT, BHVD_FLOAT32, 3, &wrong) == 0, "a negative share");
    EXPECT(bhvd_encoded_size(BHVD_CODEC_BLOCK8, BHVD_FLOAT32, 257, NULL) == 32 + 32 + 288, "header, scales, codes");
    EXPECT(bhvd_encoded_size(BHVD_CODEC_BLOCK4, BHVD_FLOAT16, 257, NULL) == 32 + 32 + 160, "half as many");
    EXPECT(bhvd_encoded_size(BHVD_CODEC_BLOCK4, BHVD_FLOAT64, 513, NULL) == 32 + 32 + 288, "a number for each block");
    EXPECT(bhvd_encoded_size(BHVD_CODEC_FLOAT8, BHVD_FLOAT32, 33, &odd) == 0, "no size of a block");
    EXPECT(bhvd_encoded_size(BHVD_CODEC_ROTATED3, BHVD_FLOAT32, 1, NULL) == 32 + 32 + 96, "header, scale, three parts");
    EXPECT(bhvd_encoded_size(BHVD_CODEC_ROTATED1, BHVD_FLOAT16, 8 * 512 + 257, NULL) == 32 + 64 + 9 * 64, "nine blocks");
    EXPECT(bhvd_encoded_size(BHVD_CODEC_ROTATED2, BHVD_FLOAT32, 33, &odd) == 0, "no size of a block");
    EXPECT(bhvd_encode(BHVD_CODEC_MINMAX_UINT8, BHVD_INT32, bytes, &x, 1, NULL) == BHVD_ERR_UNSUPPORTED, "integers");
    EXPECT(bhvd_encode(BHVD_CODEC_NONE, BHVD_FLOAT32, bytes, &x, 1, NULL) == BHVD_ERR_UNSUPPORTED, "no codec");
    EXPECT(bhvd_encode(BHVD_CODEC_TOPK, BHVD_FLOAT32, bytes, &x, 1, &wrong) == BHVD_ERR_ARGUMENT, "a negative share");
    for (int codec = BHVD_CODEC_MINMAX_UINT8; codec < BHVD_CODEC_COUNT; codec++) {
        const int has_header =
            codec != BHVD_CODEC_FLOAT16 && codec != BHVD_CODEC_BFLOAT16 && codec != BHVD_CODEC_FLOAT32;
        memset(bytes, 0, sizeof bytes);
        x = 1, sum = 2;
        EXPECT(bhvd_decode(codec, BHVD_FLOAT32, &x, bytes, 1, NULL) == (has_header ? BHVD_ERR_ARGUMENT : BHVD_OK),
               "a header, codec %d", codec);
        EXPECT(bhvd_decode_add(codec, BHVD_FLOAT32, &sum, bytes, 1, NULL) ==
               (has_header ? BHVD_ERR_ARGUMENT : BHVD_OK), "a header, codec %d", codec);
        EXPECT(x == has_header && sum == 2, "dst is left alone, codec %d", codec);
        x = 3;
        EXPECT(bhvd_encode(codec, BHVD_FLOAT32, bytes, &x, 1, NULL) == BHVD_OK, "codec %d", codec);
        x = 0;
        EXPECT(bhvd_decode(codec, BHVD_FLOAT32, &x, bytes, 1, NULL) == BHVD_OK && fabsf(x - 3) < 1e-5f,
               "codec %d", codec);
        EXPECT(bhvd_decode_add(codec, BHVD_FLOAT32, &sum, bytes, 1, NULL) == BHVD_OK && fabsf(sum - 5) < 1e-5f,
               "codec %d", codec);
        EXPECT(bhvd_encode(codec, BHVD_FLOAT32, bytes, NULL, 0, NULL) == BHVD_OK, "no elements, codec %d", codec);
        EXPECT(bhvd_decode(codec, BHVD_FLOAT32, NULL, bytes, 0, NULL) == BHVD_OK, "no elements, codec %d", codec);
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
