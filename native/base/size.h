// Arithmetic of sizes.
#pragma once

#include <stddef.h>

enum { CACHE_LINE = 64 };

static inline size_t size_min(size_t a, size_t b) { return a < b ? a : b; }

// Whole units.
static inline size_t size_round_up(size_t size, size_t unit) { return (size + unit - 1) / unit * unit; }

// The smallest of `least` times a power of two: few different sizes, so that memory that is kept fits again.
static inline size_t size_double_up(size_t size, size_t least)
{
    while (least < size)
        least *= 2;
    return least;
}
