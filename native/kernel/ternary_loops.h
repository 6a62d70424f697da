// Codec ternary, one element at a time. Written as of_element.h says.
#define TERNARY(name) NAME(JOIN(ternary_##name, ELEMENT))

#include "kernel/decode_loops.h"

static void TERNARY(encode)(void *dst, const void *src, size_t count, const struct bhvd_codec_options *options)
{
    const char *from = src;
    char *blocks = (char *)dst + CODEC_HEADER;
    int is_finite = 1;
    REAL s = 0;
    for (size_t i = 0; i < count; i++) {
        const REAL x = LOAD(from + SIZE * i), magnitude = x < 0 ? -x : x;
        is_finite &= magnitude <= REAL_MAX;
        s = magnitude > s ? magnitude : s;
    }
    s = is_finite ? s : (REAL)NAN;
    codec_header_init(dst, TERNARY_VERSION, is_finite);
    memcpy(dst, &s, sizeof s);
    memset(blocks, 0, ternary_blocks_size(count));
    if (!is_finite)
        return;
    struct codec_key key = codec_key(options->seed, 0);
    struct ternary_block block = {0, 0};
    for (size_t i = 0; i < count; i++) {
        if (i % TERNARY_BLOCK == 0)
            block = (struct ternary_block){0, 0};
        if ((uint32_t)i == 0)
            key = codec_key(options->seed, i);
        const REAL x = LOAD(from + SIZE * i), magnitude = x < 0 ? -x : x;
        const uint32_t kept = ARITHMETIC(ternary, is_kept)(magnitude, s, codec_uniform(key, (uint32_t)i));
        block.kept |= kept << i % TERNARY_BLOCK;
        block.negative |= (kept & (x < 0)) << i % TERNARY_BLOCK;
        memcpy(blocks + i / TERNARY_BLOCK * sizeof block, &block, sizeof block);
    }
}

struct TERNARY(decoder) {
    const char *blocks;
    REAL s;
};

INLINE struct TERNARY(decoder) TERNARY(decoder_of)(const void *src)
{
    struct TERNARY(decoder) decoder = {.blocks = (const char *)src + CODEC_HEADER};
    memcpy(&decoder.s, src, sizeof decoder.s);
    decoder.s = decoder.s == decoder.s ? decoder.s : (REAL)NAN;
    return decoder;
}

INLINE REAL TERNARY(decode_one)(const struct TERNARY(decoder) *d, size_t i)
{
    struct ternary_block block;
    memcpy(&block, d->blocks + i / TERNARY_BLOCK * sizeof block, sizeof block);
    const REAL magnitude = block.kept >> i % TERNARY_BLOCK & 1 || d->s != d->s ? d->s : 0;
    return block.negative >> i % TERNARY_BLOCK & 1 ? -magnitude : magnitude;
}

DECODE_LOOPS(ternary, TERNARY(decoder), TERNARY(decoder_of)(src), TERNARY(decode_one))
