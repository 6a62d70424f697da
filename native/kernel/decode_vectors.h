// Decoding by vectors, the same for all codecs of one code per element. The includer has the vectors of vectors.h, and
// defines
//     struct grid, grid_load(src, count, element)    what the code at src says of the whole chunk
//     dequantize(grid, i, v)    vector number v of the block of 32 elements that begins with element i. A code is
//     padded:
//                               of a last, shorter block all vectors can be asked for

// Results too large for the caches are written past them, where their alignment allows it.
INLINE int can_stream(const void *dst, size_t count, const struct element *element)
{
    return element->size == sizeof(float) && count >= STREAM_COUNT && (uintptr_t)dst % sizeof(vec) == 0;
}

INLINE void decode_block(char *to, const struct grid *grid, size_t i, const struct element *element, int stream)
{
    for (int v = 0; v < BLOCK / LANES; v += 2) {
        const vec a = dequantize(grid, i, v), b = dequantize(grid, i, v + 1);
        if (stream) {
            vec_stream(to + v * sizeof(vec), a);
            vec_stream(to + (v + 1) * sizeof(vec), b);
        } else
            element->store_two(to + v * LANES * element->size, a, b);
    }
}

INLINE void decode(void *dst, const void *src, size_t count, const struct element *element)
{
    char *to = dst;
    const struct grid grid = grid_load(src, count, element);
    size_t i = 0;
    if (can_stream(dst, count, element)) {
        for (; i + BLOCK <= count; i += BLOCK)
            decode_block(to + i * element->size, &grid, i, element, 1);
        _mm_sfence();                   // before the result is announced to another thread
    }
    for (; i + BLOCK <= count; i += BLOCK)
        decode_block(to + i * element->size, &grid, i, element, 0);
    if (i < count) {
        char last[BLOCK * sizeof(float)];
        decode_block(last, &grid, i, element, 0);
        memcpy(to + i * element->size, last, (count - i) * element->size);
    }
}

INLINE void add_block(char *to, const struct grid *grid, size_t i, const struct element *element)
{
    for (int v = 0; v < BLOCK / LANES; v++) {
        char *at = to + v * sizeof(vec);
        vec_store(at, vec_add(vec_load(at), element->round(dequantize(grid, i, v))));
    }
}

INLINE void decode_add(float *dst, const void *src, size_t count, const struct element *element)
{
    char *to = (char *)dst;
    const struct grid grid = grid_load(src, count, element);
    size_t i = 0;
    for (; i + BLOCK <= count; i += BLOCK)
        add_block(to + 4 * i, &grid, i, element);
    if (i < count) {
        char last[BLOCK * sizeof(float)] = {0};
        memcpy(last, to + 4 * i, 4 * (count - i));
        add_block(last, &grid, i, element);
        memcpy(to + 4 * i, last, 4 * (count - i));
    }
}

#define DECODE(element)                                                                                             \
    static void NAME(decode_##element)(void *dst, const void *src, size_t count,                                    \
                                       const struct bhvd_codec_options *options)                                    \
    {                                                                                                               \
        (void)options;                                                                                              \
        decode(dst, src, count, &element);                                                                          \
    }                                                                                                               \
    static void NAME(decode_add_##element)(float *dst, const void *src, size_t count,                               \
                                           const struct bhvd_codec_options *options)                                \
    {                                                                                                               \
        (void)options;                                                                                              \
        decode_add(dst, src, count, &element);                                                                      \
    }
DECODE(f32)
DECODE(f16)
DECODE(bf16)

// Puts a codec whose encoders are <encoder>_encode_f32_<isa>, ... into the table.
#define CODEC_VECTORS(table, codec, encoder)                                                                        \
    do {                                                                                                            \
        struct kernel_codec *dtypes = (table)->codecs[codec];                                                       \
        kernel_codec_set(&dtypes[BHVD_FLOAT32], NAME(encoder##_encode_f32), NAME(decode_f32), NAME(decode_add_f32)); \
        kernel_codec_set(&dtypes[BHVD_FLOAT16], NAME(encoder##_encode_f16), NAME(decode_f16), NAME(decode_add_f16)); \
        kernel_codec_set(&dtypes[BHVD_BFLOAT16], NAME(encoder##_encode_bf16), NAME(decode_bf16),                    \
                         NAME(decode_add_bf16));                                                                    \
    } while (0)
