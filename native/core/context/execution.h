// Agreed operations that this rank executes together, in the one order of the job.
#pragma once

#include "run/plan.h"

// Some fused operations that are executed together.
struct execution {
    struct execution *next;
    uint64_t number;            // in the order of all responses of the job, from 1
    uint64_t after;             // it starts when those up to this number are over
    struct wire wire;           // as the coordinator has measured it: all choose by the same figures
    uint32_t process_set;       // the set may be gone when its turn comes: looked up then
    struct sent sent;           // for it, so far
    struct plan plan;           // of what goes on beside others
    int count;
    struct work *works[];       // of operations
};
