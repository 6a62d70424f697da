// Codecs sign and sign_rms, one element at a time; see of_element.h.
#define SIGN(name) NAME(JOIN(sign_##name, ELEMENT))

#include "kernel/decode_loops.h"

INLINE void SIGN(encode_scaled)(void *dst, const void *src, size_t count, int squares)
{
    const char *from = src;
    uint8_t *bits = (uint8_t *)dst + CODEC_HEADER;
    double sums[CODEC_SUMS] = {0};
    memset(bits, 0, sign_bits_size(count));
    for (size_t begin = 0, block = 0; begin < count; begin += CODEC_SUMS_BLOCK, block++) {
        const size_t end = count - begin < CODEC_SUMS_BLOCK ? count : begin + CODEC_SUMS_BLOCK;
        double parts[CODEC_SUMS] = {0};
        for (size_t i = begin; i < end; i++) {
            const double x = LOAD(from + SIZE * i), magnitude = fabs(x);
            parts[i % CODEC_SUMS] += squares ? magnitude * magnitude : magnitude;
            bits[i / 8] |= (uint8_t)((x < 0) << i % 8);
        }
        sums[block % CODEC_SUMS] += codec_sums_total(parts);
    }
    const REAL scale = (REAL)sign_scale(codec_sums_total(sums), count, squares);
    if (scale != scale)
        memset(bits, 0, sign_bits_size(count));
    codec_header_init(dst, SIGN_VERSION, scale == scale);
    memcpy(dst, &scale, sizeof scale);
}

ENCODE(sign, ELEMENT) { SIGN(encode_scaled)(dst, src, count, 0); }
ENCODE(sign_rms, ELEMENT) { SIGN(encode_scaled)(dst, src, count, 1); }

struct SIGN(decoder) {
    const uint8_t *bits;
    REAL scale;
};

INLINE struct SIGN(decoder) SIGN(decoder_of)(const void *src)
{
    struct SIGN(decoder) decoder = {.bits = (const uint8_t *)src + CODEC_HEADER};
    memcpy(&decoder.scale, src, sizeof decoder.scale);
    decoder.scale = decoder.scale == decoder.scale ? decoder.scale : (REAL)NAN;
    return decoder;
}

INLINE REAL SIGN(decode_one)(const struct SIGN(decoder) *d, size_t i)
{
    return d->bits[i / 8] >> i % 8 & 1 ? -d->scale : d->scale;
}

DECODE_LOOPS(sign, SIGN(decoder), SIGN(decoder_of)(src), SIGN(decode_one))
