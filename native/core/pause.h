// How an engine without work waits: it spins, then yields its core, then sleeps in poll() on its bell and its sockets.
#ifndef BHVD_PAUSE_H
#define BHVD_PAUSE_H

#include "core/progress.h"

struct pollfd;

enum { SOCKET_ROUNDS = 16 };        // looking at a socket is a system call: only every so many rounds

// Sets how long this context's engine spins and yields. False: no memory.
bool pause_init(bhvd_context *ctx);

// A round of waiting. *rounds counts those since the last progress. ready: what the caller waits for, looked at once more
// before a sleep; NULL: nothing.
void pause_engine(bhvd_context *ctx, int *rounds, int64_t deadline_ns, progress_ready_fn ready, void *arg);
// Is the pause a sleep after so many rounds?
bool pause_sleeps(bhvd_context *ctx, int rounds);
// Over a network, while this process computes: every look takes the core from the computation, and a socket that is looked
// at all the time moves a packet at a time. poll() wakes for what is worth it.
bool pause_is_patient(bhvd_context *ctx);
// The processor's own, of some cycles.
void pause_processor(void);

// For the progress thread, which sleeps without the engine. What the others' bells are told, and what it is when this rank
// sleeps now.
void pause_set_bell(bhvd_context *ctx, enum bell_state state);
enum bell_state pause_bell_asleep(bhvd_context *ctx);
// What it sleeps on: room for all, NULL: no memory; filled, how many. looking: the sleep is only a moment long.
struct pollfd *pause_fds_create(const bhvd_context *ctx);
int pause_fill_fds(bhvd_context *ctx, struct pollfd *fds);
void pause_in_poll(struct pollfd *fds, int count, int timeout_ms, bool looking);

#endif
