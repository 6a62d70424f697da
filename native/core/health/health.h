// Heartbeats detect a rank that is silent although none of its connections has ended: a stopped process, a machine or
// a link that went down, a connection that drops packets.
//
// Every rank sends one to the coordinator, and the coordinator to every rank, about once a second while its engine runs. The engine
// runs in C without Python, so a rank in a long computation is not considered lost. A rank that is silent for
// heartbeat_timeout_ms is lost. A star is enough: the coordinator reports lost ranks to all others. A connection that broke between
// two other ranks is detected by the rank that sends over it: the peer's host must acknowledge the data
// within the same limit.
//
// Members send the execution that they are at, and the coordinator the earliest of all ranks: a rank that waits in a later one
// knows that the earlier one's limit applies instead of its own.
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "bagua_hvd.h"
#include "base/bytes.h"

struct link;

// State of another rank; all but `acknowledged` only for ranks that this one monitors.
struct peer_state {
    uint64_t received;              // bytes and frames at the last check
    int64_t at_ns;                  // when that number last grew
    uint64_t acknowledged;          // bytes and messages sent to it when nothing was in flight any more
    uint64_t execution;             // its earliest unfinished one; 0: none. From the coordinator: the earliest of all ranks
};

struct heartbeat {
    int interval_ms;
    int64_t silence_ns;             // after which another rank is lost; 0: never
    int64_t stopped_ns;             // if this rank did not check for this long, it was stopped itself
    int64_t checked_ns, next_ns;
    struct peer_state ranks[];      // by global rank
};

// Freed with the context. BHVD_ERR_SYSTEM: no memory.
bhvd_status heartbeat_init(bhvd_context *ctx);

// Sends heartbeats that are due, and fails the context if a rank is lost. Call after the engine has read its input.
void heartbeat_check(bhvd_context *ctx);

// Keeps the execution that the peer says it is at. Any frame, not only this one, shows that the peer is alive.
bhvd_status heartbeat_on_frame(bhvd_context *ctx, struct link *link, struct bytes_reader payload);

// Is some rank still at an execution before the one that runs here? Then all ranks that this one waits for may be busy.
bool heartbeat_others_are_earlier(const bhvd_context *ctx);

// stall.c. Warns about operations that wait too long for some rank, and ends the job if that was requested. Checks
// only once a second; does nothing on other ranks than 0.
void stall_check(bhvd_context *ctx);
// Handles the coordinator's notice that other ranks wait for this one.
bhvd_status stall_on_notice(bhvd_context *ctx, struct link *link, struct bytes_reader payload);
