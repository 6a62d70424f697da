// The decoding of a codec, one element at a time. Part of a codec's loops; see of_element.h.
//
// <name>_decode_<element>_<isa> and <name>_decode_add_...; decoder: a struct with what all elements need, made from src, count and
// options; one(decoder, i): element i. It is rounded to the element type before it is added.
#define DECODE_LOOPS(name, type, decoder, one)                                                          \
    DECODE(name, ELEMENT)                                                                               \
    {                                                                                                   \
        const struct type d = decoder;                                                                  \
        for (size_t i = 0; i < count; i++)                                                              \
            STORE((char *)dst + SIZE * i, one(&d, i));                                                  \
    }                                                                                                   \
    DECODE_ADD(name, ELEMENT)                                                                           \
    {                                                                                                   \
        const struct type d = decoder;                                                                  \
        for (size_t i = 0; i < count; i++) {                                                            \
            char element[SIZE];                                                                         \
            STORE(element, one(&d, i));                                                                 \
            store_f32((char *)dst + 4 * i, (float)(load_f32((char *)dst + 4 * i) + LOAD(element)));     \
        }                                                                                               \
    }
