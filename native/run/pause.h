// How an engine without work waits: it spins, then yields its core, then sleeps in poll() on its doorbell and its sockets.
#pragma once

#include "run/run.h"

enum {
    SOCKET_ROUNDS = 16,             // polling sockets is a system call: done only once in this many rounds
    POLLS_PER_LOOK = 256            // reading the clock takes as long as a poll
};

// Sets how long a thread that runs the engine spins and yields.
void pause_init(struct run *run);

// One round of waiting. *rounds counts those since the last progress. ready: the caller's condition, checked once more
// before a sleep; NULL: none.
void pause_engine(struct run *run, int *rounds, int64_t deadline_ns, run_ready_fn ready, void *arg);
// Is the pause after this many rounds a sleep?
bool pause_sleeps(struct run *run, int rounds);
// Sleep at once? True over a network while this process computes: each poll takes the core from the computation, and a socket that
// is polled continuously moves one packet at a time. poll() wakes for larger amounts.
bool pause_blocks(struct run *run);
// The CPU's pause instruction, of some cycles.
void pause_processor(void);

// For threads that sleep without the engine. Sets the state that ranks read before they ring this rank's doorbell.
void pause_set_doorbell(struct run *run, enum doorbell_state state);
// The sleep. links_too: false after a failure, when nobody reads the sockets any more. looking: sleep only LOOK_AGAIN_NS.
void pause_in_poll(const struct connections *c, bool links_too, int timeout_ms, bool looking);
