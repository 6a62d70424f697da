// Selects the k elements of largest magnitude, for codecs topk and topk_2bit. Ties and NaNs: topk_kernels.c.
//
// Selection is a radix select over the bits of |x|, which order as the numbers do: one histogram of the leading 11 bits, one of the
// next 11 among the elements that share the leading ones with the k-th, and so on; then one pass collects. For a small share of
// many elements, it considers only candidates: elements of at least a magnitude that, according to a sample, somewhat more than k
// reach. If fewer than k, or far more, reach it, all elements are considered. The result is the same. Time O(d).
#pragma once

#include <math.h>
#include <stdlib.h>

#include "kernel/loops.h"

enum {
    TOPK_DIGIT_BITS = 11,
    TOPK_BINS = 1 << TOPK_DIGIT_BITS,
    TOPK_BLOCK = 32,                    // elements that are compared together
    TOPK_SAMPLE = 4096,                 // elements
    TOPK_CHUNK = 8,                     // sampled elements are in chunks of this length: fewer cache lines are read
    TOPK_CANDIDATES_FROM = 8 * TOPK_SAMPLE,     // elements, from which on sampling for candidates pays
    TOPK_BATCH = 256                    // blocks
};

// An element type.
struct topk_element {
    size_t size;
    int bits;                           // of the magnitude
    uint64_t infinity;                  // its magnitude
    uint64_t nan;                       // the magnitude of a NaN
    double (*number)(uint64_t magnitude);
    uint64_t (*rounded)(double number); // the magnitude of a number >= 0
    // Bit i: element i of a block has a magnitude of `least` or more; least <= infinity + 1. NULL: compares one by one.
    uint32_t (*at_least)(const char *block, uint64_t least);
};

// Called for kept element j.
typedef void topk_visitor(void *state, size_t j, uint32_t index, const char *x, uint64_t magnitude);

// The magnitude as an integer that orders as |x| does; for every NaN: infinity + 1.
INLINE uint64_t topk_magnitude(const char *x, const struct topk_element *element)
{
    uint64_t bits = 0;
    memcpy(&bits, x, element->size);
    bits &= ((uint64_t)1 << element->bits) - 1;
    return bits <= element->infinity ? bits : element->infinity + 1;
}

// at_least for some elements, at most a block.
INLINE uint32_t topk_at_least_few(const char *block, size_t count, uint64_t least, const struct topk_element *element)
{
    uint32_t found = 0;
    for (size_t i = 0; i < count; i++)
        found |= (uint32_t)(topk_magnitude(block + i * element->size, element) >= least) << i;
    return found;
}

INLINE uint32_t topk_candidates(const char *src, size_t i, size_t count, uint64_t least,
                                const struct topk_element *element)
{
    const char *block = src + i * element->size;
    if (count - i < TOPK_BLOCK)
        return topk_at_least_few(block, count - i, least, element);
    return element->at_least ? element->at_least(block, least) : topk_at_least_few(block, TOPK_BLOCK, least, element);
}

// The largest digit that at least `kept` elements reach. *kept becomes the number to keep among those with exactly this digit.
INLINE uint32_t topk_digit(const uint32_t *bins, int width, uint32_t *kept)
{
    uint32_t digit = (1u << width) - 1;
    for (; bins[digit] < *kept; digit--)
        *kept -= bins[digit];
    return digit;
}

struct topk_candidate {
    uint64_t magnitude;
    uint32_t index;
};

// Which elements of a segment are kept.
struct topk_selection {
    const char *src;
    size_t count;
    const struct topk_element *element;
    struct topk_candidate *list;        // by index; NULL: all elements are candidates
    size_t listed;                      // number of candidates, then of kept elements
    uint64_t threshold;
    uint32_t ties;                      // number of elements of exactly this magnitude that are kept
};

// Counts an element by its digit of `width` bits from bit `shift` on, if it has the leading bits of `prefix`.
INLINE void topk_tally(uint32_t *bins, uint64_t magnitude, uint64_t prefix, int shift, int width)
{
    if (magnitude >> shift >> width == prefix)
        bins[magnitude >> shift & ((1u << width) - 1)]++;
}

// The magnitude of the k-th largest candidate; sets *ties to the number of elements of exactly this magnitude that are kept.
INLINE uint64_t topk_threshold(const struct topk_selection *of, size_t k, uint32_t *ties)
{
    const struct topk_element *element = of->element;
    uint64_t prefix = 0;                // the leading bits of the result
    uint32_t kept = (uint32_t)k;        // elements still to find among those with this prefix
    int shift = element->bits;
    while (shift > 0) {
        const int width = shift < TOPK_DIGIT_BITS ? shift : TOPK_DIGIT_BITS;
        uint32_t bins[TOPK_BINS] = {0};
        shift -= width;
        if (of->list) {
            for (size_t i = 0; i < of->listed; i++)
                topk_tally(bins, of->list[i].magnitude, prefix, shift, width);
        } else if (shift + width == element->bits) {            // the first digit: all elements share the empty prefix
            for (size_t i = 0; i < of->count; i++)
                bins[topk_magnitude(of->src + i * element->size, element) >> shift]++;
        } else for (size_t i = 0; i < of->count; i += TOPK_BLOCK) {
            uint32_t found = topk_candidates(of->src, i, of->count, prefix << shift << width, element);
            for (; found; found &= found - 1) {
                const char *x = of->src + (i + (size_t)__builtin_ctz(found)) * element->size;
                topk_tally(bins, topk_magnitude(x, element), prefix, shift, width);
            }
        }
        prefix = prefix << width | topk_digit(bins, width, &kept);
    }
    *ties = kept;
    return prefix;
}

// Blocks with candidates, from block i on; appended without a branch, which would be unpredictable.
struct topk_found {
    uint32_t index, found;
};

INLINE size_t topk_find(const struct topk_selection *of, size_t i, uint64_t least, struct topk_found *blocks)
{
    const size_t batch = (size_t)TOPK_BATCH * TOPK_BLOCK, end = of->count - i < batch ? of->count : i + batch;
    size_t n = 0;
    for (; i < end; i += TOPK_BLOCK) {
        blocks[n] = (struct topk_found){(uint32_t)i, topk_candidates(of->src, i, of->count, least, of->element)};
        n += blocks[n].found != 0;
    }
    return n;
}

INLINE struct topk_candidate topk_candidate(const struct topk_selection *of, uint32_t index, uint32_t found)
{
    index += (uint32_t)__builtin_ctz(found);
    return (struct topk_candidate){topk_magnitude(of->src + index * of->element->size, of->element), index};
}

// Lists the elements that reach a magnitude. Returns their number; `capacity` or more: they do not fit. Always writes two entries
// per block, since a branch would be unpredictable.
INLINE size_t topk_collect(const struct topk_selection *of, uint64_t least, struct topk_candidate *list, size_t capacity)
{
    struct topk_found blocks[TOPK_BATCH];
    size_t listed = 0;
    for (size_t i = 0; i < of->count; i += (size_t)TOPK_BATCH * TOPK_BLOCK) {
        const size_t n = topk_find(of, i, least, blocks);
        for (size_t b = 0; b < n; b++) {
            const uint32_t first = blocks[b].found, second = first & (first - 1);
            if (capacity - listed <= TOPK_BLOCK)
                return capacity;
            list[listed] = topk_candidate(of, blocks[b].index, first);
            list[listed + 1] = topk_candidate(of, blocks[b].index, second ? second : first);
            listed += 1 + (second != 0);
            for (uint32_t found = second & (second - 1); found; found &= found - 1)
                list[listed++] = topk_candidate(of, blocks[b].index, found);
        }
    }
    return listed;
}

// Lists the candidates, if at least k, but not too many, reach the guess.
INLINE void topk_list(struct topk_selection *of, size_t k)
{
    const struct topk_element *element = of->element;
    const double expected = (double)k / (double)of->count * TOPK_SAMPLE, most = expected + 3 * sqrt(expected) + 4;
    if (of->count < TOPK_CANDIDATES_FROM || most > TOPK_SAMPLE / 4)
        return;
    char sample[TOPK_SAMPLE * sizeof(uint64_t)];
    uint32_t ties;
    const size_t apart = of->count / (TOPK_SAMPLE / TOPK_CHUNK);
    for (size_t chunk = 0; chunk < TOPK_SAMPLE / TOPK_CHUNK; chunk++)
        memcpy(sample + chunk * TOPK_CHUNK * element->size, of->src + chunk * apart * element->size, TOPK_CHUNK * element->size);
    const struct topk_selection of_sample = {.src = sample, .count = TOPK_SAMPLE, .element = element};
    const uint64_t guess = topk_threshold(&of_sample, (size_t)most, &ties);
    const size_t capacity = (size_t)(1.5 * most / TOPK_SAMPLE * (double)of->count) + 2 * TOPK_BLOCK;
    of->list = malloc(capacity * sizeof *of->list);
    of->listed = of->list ? topk_collect(of, guess, of->list, capacity) : 0;
    if (of->listed < k || of->listed == capacity) {
        free(of->list);
        of->list = NULL;
        of->listed = 0;
    }
}

// Whether the next candidate, in the order of indices, is kept. left: number of ties still to keep.
INLINE uint32_t topk_is_kept(const struct topk_selection *of, uint64_t magnitude, uint32_t *left)
{
    const uint32_t is_tie = (magnitude == of->threshold) & (*left > 0);
    *left -= is_tie;
    return is_tie | (magnitude > of->threshold);
}

// Reduces the list to the kept elements, without a branch.
static inline void topk_keep(struct topk_selection *of)
{
    uint32_t left = of->ties;
    size_t kept = 0;
    for (size_t i = 0; i < of->listed; i++) {
        of->list[kept] = of->list[i];
        kept += topk_is_kept(of, of->list[i].magnitude, &left);
    }
    of->listed = kept;
}

INLINE struct topk_selection topk_select(const char *src, size_t count, size_t k, const struct topk_element *element)
{
    struct topk_selection of = {src, count, element, NULL, 0, 0, 0};
    topk_list(&of, k);
    of.threshold = topk_threshold(&of, k, &of.ties);
    topk_keep(&of);
    return of;
}

static inline void topk_selection_fini(struct topk_selection *of) { free(of->list); }

// Visits the kept elements in the order of their indices.
INLINE void topk_visit(const struct topk_selection *of, topk_visitor *visit, void *state)
{
    const struct topk_element *element = of->element;
    uint32_t left = of->ties;
    size_t j = 0;
    for (; j < of->listed; j++) {
        const struct topk_candidate *candidate = &of->list[j];
        visit(state, j, candidate->index, of->src + candidate->index * element->size, candidate->magnitude);
    }
    for (size_t i = 0; !of->list && i < of->count; i += TOPK_BLOCK) {
        uint32_t found = topk_candidates(of->src, i, of->count, of->threshold, element);
        for (; found; found &= found - 1) {
            const uint32_t index = (uint32_t)i + (uint32_t)__builtin_ctz(found);
            const char *x = of->src + index * element->size;
            const uint64_t magnitude = topk_magnitude(x, element);
            if (topk_is_kept(of, magnitude, &left))
                visit(state, j++, index, x, magnitude);
        }
    }
}
