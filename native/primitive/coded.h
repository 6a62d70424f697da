// What the low-precision primitives share: codes of an encoder in their schedules.
#pragma once

#include "primitive/encoder.h"
#include "primitive/primitive.h"
#include "primitive/schedules.h"

// struct codes: the size of those of an encoder, which is its `arg`.
size_t coded_size(const void *encoder, size_t count);
// Has these codes sent and received, instead of making any.
void coded_use_ready(struct codes *codes, struct plan *plan, const struct ready_codes *ready);
