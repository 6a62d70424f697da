// Codec ternary, one element at a time. What the includer defines: for_each_element.h.
#define LOAD JOIN(load, ELEMENT)
#define STORE JOIN(store, ELEMENT)
#define TERNARY(name) NAME(JOIN(ternary_##name, ELEMENT))
#define IS_KEPT_(real) ternary_##real##_is_kept
#define IS_KEPT__(real) IS_KEPT_(real)
#define IS_KEPT IS_KEPT__(REAL)

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
        const uint32_t kept = IS_KEPT(magnitude, s, codec_uniform(key, (uint32_t)i));
        block.kept |= kept << i % TERNARY_BLOCK;
        block.negative |= (kept & (x < 0)) << i % TERNARY_BLOCK;
        memcpy(blocks + i / TERNARY_BLOCK * sizeof block, &block, sizeof block);
    }
}

// Element i as it is decoded, into `element`.
INLINE void TERNARY(decode_one)(char *element, const void *src, size_t i, REAL s)
{
    struct ternary_block block;
    memcpy(&block, (const char *)src + CODEC_HEADER + i / TERNARY_BLOCK * sizeof block, sizeof block);
    const REAL magnitude = block.kept >> i % TERNARY_BLOCK & 1 || s != s ? s : 0;
    STORE(element, block.negative >> i % TERNARY_BLOCK & 1 ? -magnitude : magnitude);
}

INLINE REAL TERNARY(scale)(const void *src)
{
    REAL s;
    memcpy(&s, src, sizeof s);
    return s == s ? s : (REAL)NAN;
}

static void TERNARY(decode)(void *dst, const void *src, size_t count, const struct bhvd_codec_options *options)
{
    const REAL s = TERNARY(scale)(src);
    (void)options;
    for (size_t i = 0; i < count; i++)
        TERNARY(decode_one)((char *)dst + SIZE * i, src, i, s);
}

static void TERNARY(decode_add)(float *dst, const void *src, size_t count, const struct bhvd_codec_options *options)
{
    const REAL s = TERNARY(scale)(src);
    char *to = (char *)dst;
    (void)options;
    for (size_t i = 0; i < count; i++) {
        char element[SIZE];
        TERNARY(decode_one)(element, src, i, s);
        store_f32(to + 4 * i, (float)(load_f32(to + 4 * i) + LOAD(element)));
    }
}

#undef LOAD
#undef STORE
#undef TERNARY
#undef IS_KEPT_
#undef IS_KEPT__
#undef IS_KEPT
#undef ELEMENT
#undef REAL
#undef REAL_MAX
#undef LARGEST
#undef SIZE
