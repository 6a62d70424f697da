// The vector that an allreduce over links works on: the tensors packed into a fusion buffer, or, when there is only
// one, its own output, so that nothing is packed.
#pragma once

#include "run/span.h"
#include "run/reduction.h"

struct vector {
    unsigned char *data;
    const struct span_list *list;
    size_t element;
    bool packed;
};

// Brings the tensors' values into this part of the vector, prescaled. Once for every part, before anything is done to it.
void vector_load(const struct vector *vector, const struct reduction *reduction, size_t begin, size_t nbytes);
// Writes the final values of this part to the tensors.
void vector_store(const struct vector *vector, size_t begin, size_t nbytes);

// Where chunk `index` of `size` begins, in bytes: the first count % size chunks are one element longer.
static inline size_t vector_chunk(size_t nbytes, size_t element, int index, int size)
{
    size_t count = nbytes / element, at = (size_t)index, longer = count % (size_t)size;
    return (count / (size_t)size * at + (at < longer ? at : longer)) * element;
}
