// How a vector is cut for encoding: into chunks, one for each rank, and these into segments, each with its own header. Also the
// seed of a segment for codecs that round at random. Plain C, also included by a CUDA file.
//
//     seed of a segment = mix(mix(mix(seed, rank), pass), begin)
//     mix(h, v) = finalizer of splitmix64 (h + (v + 1) * 0x9e3779b97f4a7c15), all modulo 2^64
//
// seed: the caller's; rank: the position in the process set; pass: 0 for a rank's own values, 1 for a mean that it owns; begin: the
// index of the segment's first element in the operation's vector. Decoding needs no seed, so ranks may use different ones. For
// codecs that rotate see encoder.h.
#pragma once

#include "kernel/element.h"

enum { SEGMENTS_MAX_COUNT = 1 << 18 };  // elements of a segment, at most

// The first count % chunks chunks are one element longer. segment: elements of a segment, at most.
struct segments {
    uint64_t count, chunks, segment;
};

struct segment_part {
    uint64_t begin, count;              // elements of the vector
};

CODEC_INLINE struct segment_part segments_chunk(const struct segments *cut, uint64_t k)
{
    const uint64_t each = cut->count / cut->chunks, longer = cut->count % cut->chunks;
    struct segment_part part = {k * each + (k < longer ? k : longer), each + (k < longer)};
    return part;
}

// Segments of the longest chunk, which is the first one. Shorter chunks may end with an empty segment.
CODEC_INLINE uint64_t segments_in_chunk(const struct segments *cut)
{
    return (segments_chunk(cut, 0).count + cut->segment - 1) / cut->segment;
}

// Segment s of chunk k; empty past the chunk's end.
CODEC_INLINE struct segment_part segments_part(const struct segments *cut, uint64_t k, uint64_t s)
{
    const struct segment_part chunk = segments_chunk(cut, k);
    const uint64_t skipped = s * cut->segment, left = chunk.count > skipped ? chunk.count - skipped : 0;
    struct segment_part part = {chunk.begin + skipped, left < cut->segment ? left : cut->segment};
    return part;
}

CODEC_INLINE uint64_t segments_mix(uint64_t h, uint64_t v)
{
    h += (v + 1) * 0x9e3779b97f4a7c15u;
    h = (h ^ h >> 30) * 0xbf58476d1ce4e5b9u;
    h = (h ^ h >> 27) * 0x94d049bb133111ebu;
    return h ^ h >> 31;
}
