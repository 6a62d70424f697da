// Elements of codecs rotated1 to rotated4, one at a time; see of_element.h.
#define ROTATED(name) NAME(JOIN(rotated_##name, ELEMENT))

// Stores x, clamped to the largest number of the element type; only a float16 can need it.
INLINE void ROTATED(store_one)(void *p, float x)
{
    const float largest = (float)(LARGEST < FLT_MAX ? LARGEST : FLT_MAX);
    STORE(p, x > largest ? largest : x < -largest ? -largest : x);
}

SHARED void ROTATED(forward)(float *a, const char *src, size_t count, size_t d, const uint32_t *signs)
{
    for (size_t i = 0; i < d; i++)
        a[i] = i < count ? flipped((float)LOAD(src + SIZE * i), signs, i) : flipped(0, signs, i);
    transform(a, d);
}

SHARED void ROTATED(inverse)(char *dst, size_t count, float *a, size_t d, const uint32_t *signs, int adds)
{
    transform(a, d);
    for (size_t i = 0; i < count; i++) {
        char element[SIZE];
        ROTATED(store_one)(adds ? element : dst + SIZE * i, flipped(a[i], signs, i));
        if (adds)
            store_f32(dst + 4 * i, (float)(load_f32(dst + 4 * i) + LOAD(element)));
    }
}

static const struct io ROTATED(io) = {SIZE, ROTATED(forward), ROTATED(inverse), ROTATED(store_one)};
#define ROTATED_FUNCTIONS(codec, name, levels) ROTATED_FUNCTIONS_OF(dtype, ELEMENT, name)
ROTATED_EACH(ROTATED_FUNCTIONS)
