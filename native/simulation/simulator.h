// What schedules would take on a network that is not there: the time at which each rank is done.
//
// A host has one line, which its messages share one after the other, out and in; one core, which does local steps and handles
// messages in the order in which they can be; between two hosts there is a latency, and nothing is lost. A message that comes
// before it is expected waits in its socket. Not modelled: several streams, urgent messages that overtake, congestion windows.
#pragma once

#include "bagua_hvd.h"
#include "run/schedule.h"

enum { SIMULATOR_STEPS_MAX = 8 << 20 };     // under way at once; each takes some 100 bytes

// What all ranks do one after the other, several at once.
struct simulated {
    int size, count;                        // ranks, executions
    // Writes a rank's part of an execution.
    void (*write)(const void *arg, int execution, struct schedule *schedule);
    // From 1: of how many executions, this one included, all may be on their way at once.
    int (*window)(const void *arg, int execution);
    const void *arg;
};

// seconds: [size], when each rank is done. BHVD_ERR_SYSTEM: no memory; BHVD_ERR_UNSUPPORTED: more than SIMULATOR_STEPS_MAX
// steps; BHVD_ERR_MISMATCH: some rank waits for ever.
bhvd_status simulate(const struct simulated *simulated, const struct bhvd_network *network, double *seconds);
