// Adam with communicated momentum, and Adam's variance among relaxed steps: bhvd_adam_momentum, bhvd_adam_step and
// bhvd_adam_variance (bagua_hvd.h) on elements of one dtype. All instruction sets give the same bits.
#pragma once

#include <stdbool.h>

#include "bagua_hvd.h"

// x NULL: no weight decay. sent must differ from all other arrays.
typedef void (*adam_momentum_fn)(void *sent, const void *m, const void *g, const void *v, const void *x,
                                 const struct bhvd_adam *by, bool in_steps, size_t count);
// Writes x and m. before: the old values of x; may be x.
typedef void (*adam_step_fn)(void *x, void *m, const void *sent, const void *v, const void *before,
                             const struct bhvd_adam *by, bool in_steps, size_t count);
typedef void (*adam_variance_fn)(void *used, void *exact, void *own, const void *g, const struct bhvd_adam_variance *by,
                                 size_t count);

struct adam_kernels {
    adam_momentum_fn momentum;
    adam_step_fn step;
    adam_variance_fn variance;
};

// flat: BHVD_FLOAT32 or BHVD_FLOAT64.
void adam_kernels_init(struct adam_kernels *kernels, bhvd_dtype flat, unsigned cpu);
