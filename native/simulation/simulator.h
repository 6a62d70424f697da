// Simulates schedules on a model of a network: the time at which each rank is done.
//
// A host has one link, on which its messages follow each other, separately out and in. It has one core, which does local steps and
// handles messages in the order in which they become possible. Between two hosts there is a latency; no message is lost. A message
// that arrives early waits in its socket. Not modelled: several data channels, priority messages, congestion windows.
#pragma once

#include "bagua_hvd.h"
#include "executor/schedule.h"

enum { SIMULATOR_STEPS_MAX = 8 << 20 };     // in flight at once; each takes about 100 bytes

// The executions of all ranks, in order, several of them in flight at once.
struct simulated {
    int size, count;                        // ranks, executions
    // Writes a rank's part of an execution.
    void (*write)(const void *arg, int execution, struct schedule *schedule);
    // At least 1: number of executions, ending with this one, that may be in flight at once.
    int (*window)(const void *arg, int execution);
    const void *arg;
};

// seconds: [size], when each rank is done. BHVD_ERR_SYSTEM: out of memory; BHVD_ERR_UNSUPPORTED: more than SIMULATOR_STEPS_MAX
// steps; BHVD_ERR_MISMATCH: some rank waits forever.
bhvd_status simulate(const struct simulated *simulated, const struct bhvd_network *network, double *seconds);
