// The window: how many executions may be in flight at once, the newest included. It is in each response of the coordinator, so it
// is equal on all ranks (engine_has_next obeys it, core/negotiation/member.h says why this excludes deadlock).
#pragma once

#include <stdint.h>

#include "transport/link.h"

// Bounds the memory: total bytes of concurrent executions, unless there is only one. Small ones may always be concurrent.
enum { WINDOW_BYTES = 128 << 20, WINDOW_SMALL_BYTES = 64 << 10 };
#define WINDOW_ALONE SIZE_MAX           // nbytes of an execution that must be the only one

// nbytes: of the last `count` executions, newest first; count: 1 to LINK_MATCH_QUEUES.
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
