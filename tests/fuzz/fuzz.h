// Helpers of the fuzz targets, target_*.c. Each target defines LLVMFuzzerTestOneInput, which accepts any bytes and returns
// 0; the sanitizers or REQUIRE report errors. libFuzzer calls it, or driver.c.
#ifndef BHVD_FUZZ_H
#define BHVD_FUZZ_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#define REQUIRE(condition)                                                              \
    do {                                                                                \
        if (!(condition)) {                                                             \
            fprintf(stderr, "%s:%d: not %s\n", __FILE__, __LINE__, #condition);         \
            __builtin_trap();                                                           \
        }                                                                               \
    } while (0)

// Draws choices from the input; zeros when it is used up.
struct supply {
    const uint8_t *at, *end;
};

static inline uint8_t supply_u8(struct supply *s) { return s->at < s->end ? *s->at++ : 0; }

static inline uint16_t supply_u16(struct supply *s)
{
    uint16_t low = supply_u8(s);
    return (uint16_t)(low | supply_u8(s) << 8);
}

// Takes at most `size` of the next bytes; *size becomes their number.
static inline const uint8_t *supply_bytes(struct supply *s, size_t *size)
{
    const uint8_t *bytes = s->at;
    if ((size_t)(s->end - s->at) < *size)
        *size = (size_t)(s->end - s->at);
    s->at += *size;
    return bytes;
}

#endif
