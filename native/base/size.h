// Arithmetic of sizes.
#pragma once

#include <stddef.h>

enum { CACHE_LINE = 64 };

static inline size_t size_min(size_t a, size_t b) { return a < b ? a : b; }

// The size of the piece of at most `most` at `offset` of a whole of `total`; 0 past its end.
static inline size_t size_piece(size_t total, size_t offset, size_t most)
{
    return total <= offset ? 0 : size_min(total - offset, most);
}

// Rounds up to a multiple of unit.
static inline size_t size_round_up(size_t size, size_t unit) { return (size + unit - 1) / unit * unit; }

// The smallest `least` * 2^k that holds size: few different sizes, so that kept memory is reused.
static inline size_t size_double_up(size_t size, size_t least)
{
    while (least < size)
        least *= 2;
    return least;
}
