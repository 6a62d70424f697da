// Table for copying many spans in one launch; shared with kernels.cu.
#pragma once

#include "kernel/element.h"

enum { SPANS_PIECE = 16384 };           // bytes that one block of threads copies

// nbytes from src to dst. Pieces are numbered across all spans: this span begins with number first_piece.
struct device_span {
    const void *src;
    void *dst;
    uint64_t nbytes, first_piece;
};
