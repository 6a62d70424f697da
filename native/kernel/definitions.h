// Puts a codec's scalar definitions into the table.
#pragma once

#include "kernel/kernel.h"

// <encoder>_encode_f32_scalar, <decoder>_decode_f32_scalar, <decoder>_decode_add_f32_scalar, and for the other types.
#define CODEC_DEFINITION(table, codec, number, size_of, encoder, decoder, dtype, element)    \
    (table)->codecs[codec][dtype] = (struct kernel_codec)                                           \
    {                                                                                               \
        .encoded_size = size_of,      .encode = encoder##_encode_##element##_scalar,                \
        .decode = decoder##_decode_##element##_scalar,                                              \
        .decode_add = decoder##_decode_add_##element##_scalar, .version = number                    \
    }
#define CODEC_DEFINITIONS(table, codec, version, encoded_size, encoder, decoder)                            \
    do {                                                                                                    \
        CODEC_DEFINITION(table, codec, version, encoded_size, encoder, decoder, BHVD_FLOAT32, f32);         \
        CODEC_DEFINITION(table, codec, version, encoded_size, encoder, decoder, BHVD_FLOAT16, f16);         \
        CODEC_DEFINITION(table, codec, version, encoded_size, encoder, decoder, BHVD_BFLOAT16, bf16);       \
        CODEC_DEFINITION(table, codec, version, encoded_size, encoder, decoder, BHVD_FLOAT64, f64);         \
    } while (0)
