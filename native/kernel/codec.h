// The header and padding of codes, common to all codecs. Plain C, also included by a CUDA file.
//
// Code layout of one chunk: 32 bytes of header, then the codec's own content. The size of a code is bhvd_encoded_size, which both
// sides compute from codec, dtype, count and options. Numbers are little endian.
//     0..15: the codec's own, else 0    16: version    17: flags    18..31: the codec's own, else 0
// Codecs float16, bfloat16 and float32 have no header: their codes are the elements.
#pragma once

#include "kernel/processor.h"

enum {
    CODEC_HEADER = 32,                  // bytes
    CODEC_BLOCK = 32,                   // codes are padded with zeros to a multiple of this many bytes
    CODEC_VERSION_AT = 16,
    CODEC_FLAGS_AT = 17,
    CODEC_NONFINITE = 1                 // flag: the chunk holds a NaN or an infinity
};

CODEC_INLINE size_t codec_padded(size_t nbytes) { return (nbytes + CODEC_BLOCK - 1) / CODEC_BLOCK * CODEC_BLOCK; }

// Initializes the common fields of the header; the caller then stores the codec's own.
CODEC_INLINE void codec_header_init(uint8_t *header, uint8_t version, int is_finite)
{
    memset(header, 0, CODEC_HEADER);
    header[CODEC_VERSION_AT] = version;
    header[CODEC_FLAGS_AT] = is_finite ? 0 : CODEC_NONFINITE;
}
