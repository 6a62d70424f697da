// Heartbeats: how a rank that says nothing and dies of nothing is found: a process that was stopped, a machine or a link
// that went down, a connection whose packets are dropped.
//
// Every rank tells the coordinator, and the coordinator every rank, about once a second, that its engine runs. The engine
// needs no Python for it, so a rank in a long computation is not taken for dead. Who is silent for
// heartbeat_timeout_ms is lost. A star is enough: the coordinator tells all others whom it lost. What a star does not see, a
// connection that broke between two other ranks, is found by whoever sends something over it: the peer's host has to
// acknowledge it within the same limit.
//
// Members say which execution they are at, and the coordinator which is the earliest of all: whoever waits in a later one
// knows that it is not the one whose limit counts.
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "bagua_hvd.h"
#include "base/bytes.h"

struct link;

// What this rank knows of another; all but `acknowledged` only of a rank that it listens to.
struct heard {
    uint64_t received;              // bytes and frames, when looked at last
    int64_t at_ns;                  // when that number last grew
    uint64_t acknowledged;          // of what was sent to it, when nothing was on its way any more
    uint64_t execution;             // the earliest it has not finished; 0: none. Of the coordinator: of all ranks
};

struct heartbeat {
    int interval_ms;
    int64_t silence_ns;             // of another rank, until it is lost; 0: never
    int64_t away_ns;                // not having looked for so long says that this rank was stopped itself
    int64_t looked_ns, next_ns;
    struct heard ranks[];           // by global rank
};

// Freed with the context. BHVD_ERR_SYSTEM: no memory.
bhvd_status heartbeat_init(bhvd_context *ctx);

// Sends what is due, and fails the context when a rank is lost. After the engine has read what came.
void heartbeat_look(bhvd_context *ctx);

// A heartbeat came.
bhvd_status heartbeat_take(bhvd_context *ctx, struct link *link, struct bytes_reader payload);

// Is some rank still at an execution before the one that runs here? All ranks that this one waits for can be busy then.
bool heartbeat_others_are_earlier(const bhvd_context *ctx);
