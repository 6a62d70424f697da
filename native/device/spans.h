// The table of a copy of many spans in one launch; shared with kernels.cu.
#pragma once

#include "kernel/processor.h"

enum { SPANS_PIECE = 16384 };           // bytes that one block of threads copies

// nbytes from src to dst. Pieces are counted through all spans: this one's begin at number first_piece.
struct device_span {
    const void *src;
    void *dst;
    uint64_t nbytes, first_piece;
};
