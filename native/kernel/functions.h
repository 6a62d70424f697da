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
    table->codecs[codec][dtype].encode = NAME(JOIN(encoder##_encode, element));                                     \
    table->codecs[codec][dtype].decode = NAME(JOIN(decoder##_decode, element));                                     \
    table->codecs[codec][dtype].decode_add = NAME(JOIN(decoder##_decode_add, element));
// The members that are equal for all dtypes.
#define CODEC_COMMON(dtype, element, codec, number, size)                                                           \
    table->codecs[codec][dtype].version = number;                                                                   \
    table->codecs[codec][dtype].encoded_size = size;
#define CODEC_DEFINE(codec, version, encoded_size, encoder, decoder)                                                \
    EACH_FLOAT_TYPE(CODEC_COMMON, codec, version, encoded_size)                                                     \
    EACH_FLOAT_TYPE(CODEC_SET, codec, encoder, decoder)

// A cast to float32 is the decoding of float32, and one from it is the encoding. code: f16 or bf16.
#define HALF_CASTS(code)                                                                                                        \
    static void to_float_##code(float *dst, const void *src, size_t count) { NAME(code##_decode_f32)(dst, src, count, NULL); }  \
    static void from_float_##code(void *dst, const float *src, size_t count) { NAME(code##_encode_f32)(dst, src, count, NULL); }
