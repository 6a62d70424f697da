// How an engine without work waits: it spins, then yields its core, then sleeps in poll() on its doorbell and its sockets.
#pragma once

#include "executor/executor.h"

enum {
    SOCKET_ROUNDS = 16,             // polling sockets is a system call: done only once in this many rounds
    POLLS_PER_CHECK = 256           // reading the clock takes as long as a poll
};

// Sets how long a thread that runs the engine spins and yields.
void pause_init(struct executor *exec);

// One round of waiting. *rounds counts those since the last progress. ready: the caller's condition, checked once more
// before a sleep; NULL: none.
void pause_engine(struct executor *exec, int *rounds, int64_t deadline_ns, executor_ready_fn ready, void *arg);
// Sleep at once? True over a network while this process computes: each poll takes the core from the computation, and a socket that
// is polled continuously moves one packet at a time. poll() wakes for larger amounts.
bool pause_blocks(struct executor *exec);
// The CPU's pause instruction, of some cycles.
void pause_processor(void);

// For threads that sleep without the engine. Sets the state that ranks read before they ring this rank's doorbell.
void pause_set_doorbell(struct executor *exec, enum doorbell_state state);
// The sleep. links_too: false after a failure, when nobody reads the sockets any more. must_poll: sleep only POLL_AGAIN_NS.
void pause_in_poll(const struct connections *c, bool links_too, int timeout_ms, bool must_poll);
