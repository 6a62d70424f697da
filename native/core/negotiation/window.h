// How many executions may be on their way at once, the newest included: a figure in each response of the coordinator, so the same on
// all ranks (run/plan.h runs them, docs/decisions/engine.md says why no two ranks wait for each other).
#pragma once

#include <stdint.h>

#include "transport/link.h"

// So that memory is bounded: bytes of those that go on at once, unless there is only one. What is small goes beside whatever there is.
enum { WINDOW_BYTES = 128 << 20, WINDOW_SMALL_BYTES = 64 << 10 };
#define WINDOW_ALONE SIZE_MAX           // bytes of an execution that none goes beside

// nbytes: of the last `count` executions, at least 1 and at most LINK_MATCH_QUEUES, the newest first.
static inline int window_of(const size_t *nbytes, int count)
{
    const bool is_small = nbytes[0] <= WINDOW_SMALL_BYTES;
    size_t total = nbytes[0];
    int window = 1;
    for (; nbytes[0] != WINDOW_ALONE && window < count && nbytes[window] != WINDOW_ALONE; window++) {
        if (!is_small && (nbytes[window] > WINDOW_BYTES || total + nbytes[window] > WINDOW_BYTES))
            break;
        total += is_small ? 0 : nbytes[window];
    }
    return window;
}
