// The functions of a codec for each element type and instruction set, <name>_encode_f32_<isa> and so on: their signatures, and how
// to enter them in the table. The includer defines ISA.
#pragma once

#include "kernel/kernel.h"
#include "kernel/loops.h"

#define OPTIONS const struct bhvd_codec_options *options __attribute__((unused))
#define ENCODE(name, element) static void NAME(JOIN(name##_encode, element))(void *dst, const void *src, size_t count, OPTIONS)
#define DECODE(name, element) static void NAME(JOIN(name##_decode, element))(void *dst, const void *src, size_t count, OPTIONS)
#define DECODE_ADD(name, element) \
    static void NAME(JOIN(name##_decode_add, element))(float *dst, const void *src, size_t count, OPTIONS)

// The functions that a variant replaces; the others stay as in the definition.
static inline void kernel_codec_set(struct kernel_codec *codec, kernel_encode_fn encode, kernel_decode_fn decode,
                                    kernel_decode_add_fn decode_add)
{
    codec->encode = encode;
    codec->decode = decode;
    codec->decode_add = decode_add;
}

// The types that have vectors.
#define EACH_VECTOR_TYPE(of, ...)             \
    of(BHVD_FLOAT32, f32, __VA_ARGS__)        \
    of(BHVD_FLOAT16, f16, __VA_ARGS__)        \
    of(BHVD_BFLOAT16, bf16, __VA_ARGS__)
#define EACH_FLOAT_TYPE(of, ...)              \
    EACH_VECTOR_TYPE(of, __VA_ARGS__)         \
    of(BHVD_FLOAT64, f64, __VA_ARGS__)

// Enters the functions of a codec with these names in `table`.
#define CODEC_SET(dtype, element, codec, encoder, decoder)                                                          \
    kernel_codec_set(&table->codecs[codec][dtype], NAME(JOIN(encoder##_encode, element)),                           \
                     NAME(JOIN(decoder##_decode, element)), NAME(JOIN(decoder##_decode_add, element)));
#define CODEC_DEFINE(codec, version, encoded_size, encoder, decoder)                                                \
    kernel_codec_define(table->codecs[codec], version, encoded_size);                                               \
    EACH_FLOAT_TYPE(CODEC_SET, codec, encoder, decoder)

// The members that are equal for all dtypes.
static inline void kernel_codec_define(struct kernel_codec *codecs, uint8_t version, kernel_encoded_size_fn encoded_size)
{
    static const bhvd_dtype floating[] = {BHVD_FLOAT32, BHVD_FLOAT16, BHVD_BFLOAT16, BHVD_FLOAT64};
    for (size_t i = 0; i < sizeof floating / sizeof *floating; i++) {
        codecs[floating[i]].version = version;
        codecs[floating[i]].encoded_size = encoded_size;
    }
}

// A cast to float32 is the decoding of float32, and one from it is the encoding. code: f16 or bf16.
#define HALF_CASTS(code)                                                                                                            \
    static void to_float_##code(float *dst, const void *src, size_t count) { NAME(code##_decode_f32)(dst, src, count, NULL); }      \
    static void from_float_##code(void *dst, const float *src, size_t count) { NAME(code##_encode_f32)(dst, src, count, NULL); }
