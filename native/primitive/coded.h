// Schedules of codes, shared by the low-precision primitives.
#pragma once

#include "primitive/coded_schedules.h"
#include "primitive/encoder.h"
#include "primitive/primitive.h"

// The collective's vector, cut into chunks, in the codec's segments.
struct codes coded_of(const struct collective *coll, size_t nbytes, size_t chunks);
// Prepares the plan for `own` and `received` codes per segment, in scratch memory. gpu: codes that a GPU has encoded, and will
// decode; NULL: none.
void coded_plan(struct plan *plan, struct codes *codes, size_t own, size_t received, const struct network_cost *network,
                const struct gpu_codes *gpu);
// Scratch of one step, for executor_release: `nbytes`, and the encoder's for a segment. NULL: out of memory, and the executor has
// failed.
unsigned char *coded_scratch(struct executor *exec, struct encoder *encoder, const struct codes *codes, size_t nbytes);
