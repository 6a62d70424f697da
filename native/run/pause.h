// How an engine without work waits: it spins, then yields its core, then sleeps in poll() on its doorbell and its sockets.
#pragma once

#include "run/run.h"

enum {
    SOCKET_ROUNDS = 16,             // looking at a socket is a system call: only every so many rounds
    POLLS_PER_LOOK = 256            // looking at the clock takes as long as a poll
};

// Sets how long who runs the engine spins and yields.
void pause_init(struct run *run);

// A round of waiting. *rounds counts those since the last progress. ready: what the caller waits for, looked at once more
// before a sleep; NULL: nothing.
void pause_engine(struct run *run, int *rounds, int64_t deadline_ns, run_ready_fn ready, void *arg);
// Is the pause a sleep after so many rounds?
bool pause_sleeps(struct run *run, int rounds);
// Over a network, while this process computes: every look takes the core from the computation, and a socket that is looked
// at all the time moves a packet at a time. poll() wakes for what is worth it.
bool pause_is_patient(struct run *run);
// The processor's own, of some cycles.
void pause_processor(void);

// For who sleeps without the engine. What the others' doorbells are told.
void pause_set_doorbell(struct run *run, enum doorbell_state state);
// The sleep. links_too: not after a failure, when nobody reads the sockets any more. looking: it is only a moment long.
void pause_in_poll(const struct connections *c, bool links_too, int timeout_ms, bool looking);
