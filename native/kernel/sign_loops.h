// Codecs sign and sign_rms, one element at a time. What the includer defines: for_each_element.h.
#define LOAD JOIN(load, ELEMENT)
#define STORE JOIN(store, ELEMENT)
#define SIGN(name) NAME(JOIN(sign_##name, ELEMENT))

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

static void SIGN(encode)(void *dst, const void *src, size_t count, const struct bhvd_codec_options *options)
{
    (void)options;
    SIGN(encode_scaled)(dst, src, count, 0);
}

static void NAME(JOIN(sign_rms_encode, ELEMENT))(void *dst, const void *src, size_t count,
                                                 const struct bhvd_codec_options *options)
{
    (void)options;
    SIGN(encode_scaled)(dst, src, count, 1);
}

static void SIGN(decode)(void *dst, const void *src, size_t count, const struct bhvd_codec_options *options)
{
    const uint8_t *bits = (const uint8_t *)src + CODEC_HEADER;
    char *to = dst;
    REAL scale;
    char values[2][SIZE];
    (void)options;
    memcpy(&scale, src, sizeof scale);
    scale = scale == scale ? scale : (REAL)NAN;
    STORE(values[0], scale);
    STORE(values[1], -scale);
    for (size_t i = 0; i < count; i++)
        memcpy(to + SIZE * i, values[bits[i / 8] >> i % 8 & 1], SIZE);
}

static void SIGN(decode_add)(float *dst, const void *src, size_t count, const struct bhvd_codec_options *options)
{
    const uint8_t *bits = (const uint8_t *)src + CODEC_HEADER;
    char *to = (char *)dst;
    REAL scale;
    char value[SIZE];
    (void)options;
    memcpy(&scale, src, sizeof scale);
    STORE(value, scale == scale ? scale : (REAL)NAN);
    for (size_t i = 0; i < count; i++) {
        const REAL x = LOAD(value);
        store_f32(to + 4 * i, (float)(load_f32(to + 4 * i) + (bits[i / 8] >> i % 8 & 1 ? -x : x)));
    }
}

#undef LOAD
#undef STORE
#undef SIGN
#undef ELEMENT
#undef REAL
#undef REAL_MAX
#undef LARGEST
#undef SIZE
