// Messages as bytes: a growing buffer to write, and a bounded reader that cannot run past its end.
// Integers are sent little-endian, as in memory: all ranks of a job are little-endian (checked in transport/connect.c).
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

struct bytes {
    unsigned char *data;
    size_t size, capacity;
    bool failed;                // out of memory: stays set, further writes do nothing
};

void bytes_fini(struct bytes *b);
void bytes_put(struct bytes *b, const void *data, size_t size);
// Removes the first `size` bytes.
void bytes_shift(struct bytes *b, size_t size);

static inline void bytes_put_u8(struct bytes *b, uint8_t v) { bytes_put(b, &v, sizeof v); }
static inline void bytes_put_u16(struct bytes *b, uint16_t v) { bytes_put(b, &v, sizeof v); }
static inline void bytes_put_u32(struct bytes *b, uint32_t v) { bytes_put(b, &v, sizeof v); }
static inline void bytes_put_i64(struct bytes *b, int64_t v) { bytes_put(b, &v, sizeof v); }
static inline void bytes_put_f64(struct bytes *b, double v) { bytes_put(b, &v, sizeof v); }

struct bytes_reader {
    const unsigned char *at, *end;
    bool failed;                // read past the end: every later read gives 0
};

// The next `size` bytes, not copied, or NULL (and failed) if fewer are left.
static inline const unsigned char *bytes_take(struct bytes_reader *r, size_t size)
{
    if (r->failed || (size_t)(r->end - r->at) < size) {
        r->failed = true;
        return NULL;
    }
    const unsigned char *p = r->at;
    r->at += size;
    return p;
}

static inline struct bytes_reader bytes_read(const struct bytes *b)
{
    return (struct bytes_reader){b->data, b->data + b->size, false};
}

#define BYTES_TAKE(name, type)                                  \
    static inline type bytes_take_##name(struct bytes_reader *r) \
    {                                                           \
        type v = 0;                                             \
        const unsigned char *p = bytes_take(r, sizeof v);       \
        if (p)                                                  \
            memcpy(&v, p, sizeof v);                            \
        return v;                                               \
    }
BYTES_TAKE(u8, uint8_t)
BYTES_TAKE(u16, uint16_t)
BYTES_TAKE(u32, uint32_t)
BYTES_TAKE(i64, int64_t)
BYTES_TAKE(f64, double)
#undef BYTES_TAKE

// A part that begins with its size, as u32. If it does not fit: an empty one, and r has failed.
static inline struct bytes_reader bytes_take_sub(struct bytes_reader *r)
{
    const size_t size = bytes_take_u32(r);
    const unsigned char *p = bytes_take(r, size);
    return p ? (struct bytes_reader){p, p + size, false} : (struct bytes_reader){.failed = true};
}
