// What the low-precision primitives share: codes of an encoder in their schedules.
#pragma once

#include "primitive/encoder.h"
#include "primitive/primitive.h"
#include "primitive/schedules.h"

// struct codes: the size of those of an encoder, which is its `arg`.
size_t coded_size(const void *encoder, size_t count);
// The plan's schedule will have so many codes of each segment, in scratch memory; ready: these instead, and none is made.
void coded_plan(struct plan *plan, struct codes *codes, const struct encoder *encoder, size_t own, size_t received, const struct wire *wire,
                const struct ready_codes *ready);
// Memory of one step: so many bytes, and the encoder's scratch for a segment. NULL: none, and the run has failed.
unsigned char *coded_room(struct run *run, struct encoder *encoder, const struct codes *codes, size_t nbytes);
