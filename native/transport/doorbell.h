// A doorbell wakes a rank's engine, which sleeps only in poll() on its doorbell and its sockets.
//
// The state word is visible to every rank of the host (shared memory; the world's memory for inproc). After publishing
// something for another rank (bytes in a ring, a count of blocks), a rank rings that rank's doorbell: one load while
// the rank is awake, one eventfd write when it sleeps. No wake-up is lost, because publishing and the state word are
// sequentially consistent on both sides: the sleeper stores the state and then checks again, the ringer publishes and
// then loads the state.
#pragma once

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

enum doorbell_state {
    DOORBELL_AWAKE = 0,
    DOORBELL_IDLE = 1,  // asleep, no operation of its own in progress: a request to negotiate need not wake it
    DOORBELL_ASLEEP = 2  // asleep, and waiting for something
};

struct doorbell_word {
    _Alignas(64) _Atomic uint32_t state;
    // Counts the rank's progress over sockets: ranks that wait for it in shared memory see that it is not stuck.
    _Alignas(64) _Atomic uint32_t activity;
};

struct doorbell {
    struct doorbell_word *word;
    int fd;                     // eventfd, non-blocking
};

// Wakes the rank if it sleeps. no_wakeup: not when it is idle.
void doorbell_ring(struct doorbell *doorbell, int no_wakeup);
// Resets the eventfd, so that poll() sleeps again.
void doorbell_drain(struct doorbell *doorbell);
// Whether it has been rung since then.
bool doorbell_is_rung(const struct doorbell *doorbell);
