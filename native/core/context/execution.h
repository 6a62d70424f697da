// Agreed operations that this rank executes together, in the global order of the job.
#pragma once

#include "executor/plan.h"

// Fused operations that are executed together.
struct execution {
    struct execution *next;
    uint64_t number;            // in the order of all responses of the job, from 1
    uint64_t after;             // it starts when those up to this number are over
    struct network_cost network;  // as measured by the coordinator: all ranks choose by the same values
    uint32_t process_set;       // looked up when it starts, since the set may be removed before
    struct bhvd_sent sent;      // bytes sent for it so far
    struct plan plan;           // of a concurrent execution
    int count;
    struct collective *colls[];  // of operations
};

// Frees one that has not begun, with its proxies, which nobody else holds.
void execution_discard(struct execution *execution);
