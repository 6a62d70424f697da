// Schedules of codes, shared by the low-precision primitives.
#pragma once

#include "primitive/coded_schedules.h"
#include "primitive/encoder.h"
#include "primitive/primitive.h"

// For struct codes: the size of a code of the encoder in `arg`.
size_t coded_size(const void *encoder, size_t count);
// Prepares the plan for `own` and `received` codes per segment, in scratch memory; ready: for these, without encoding or decoding.
void coded_plan(struct plan *plan, struct codes *codes, const struct encoder *encoder, size_t own, size_t received,
                const struct network_cost *network, const struct ready_codes *ready);
// Scratch of one step, for executor_release: `nbytes`, and the encoder's for a segment. NULL: out of memory, and the executor has
// failed.
unsigned char *coded_scratch(struct executor *exec, struct encoder *encoder, const struct codes *codes, size_t nbytes);
