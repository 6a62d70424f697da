// The coordinator's state (coordinator.h). Empty on other ranks. Engine only.
#pragma once

#include "base/clock.h"
#include "base/fifo.h"
#include "core/context/context.h"
#include "core/message/frame.h"
#include "core/message/id_range.h"
#include "core/negotiation/pending.h"
#include "run/schedule.h"
#include "transport/link.h"

// What the coordinator has seen of a rank.
struct seen {
    uint64_t operations;                        // that it asked for
    int64_t at_ns;                              // when it did last
    struct request *last;                       // for what; NULL: nothing yet
    int stale;                                  // STALEs to it without a reply: of operations that come before its join
    bool joined, left;                          // left: it said goodbye
    _Atomic uint64_t last_asked, waited_ns;     // operations that it was the last to ask for; how long after the last but one
};

// A request for a process set that this rank is still about to add.
struct unexpected_request {
    struct unexpected_request *next;
    int rank;
    struct request *request;
};

struct coordinator {
    struct table pending;
    struct FIFO(struct pending) ready;         // complete, in the order of completion, not yet answered
    struct FIFO(struct pending) refused;        // before members asked that still will (ready.h)
    int joined_count, last_joined;
    int left_count, first_left;
    int additions;                              // process sets answered but not yet added here ...
    struct FIFO(struct unexpected_request) unexpected;  // ... and requests for them from ranks that are ahead
    int asking;                                 // whose request is being looked at
    int64_t next_stall_check_ns;
    uint64_t response_number;                   // of the response that was begun last
    struct wire wire;                           // to the farthest rank; the slowest line
    size_t nbytes_of[LINK_MATCH_QUEUES];        // of the last ones, by number
    struct bytes out;                           // the frame being written
    struct id_range range;                      // at its end
    struct seen seen[];                         // by global rank
};

// What it takes the coordinator is measured, where that was asked for: from here (0: it is not) ...
static inline int64_t coordinator_time_begin(const bhvd_context *ctx)
{
    return ctx->measures_coordinator && ctx->options.rank == COORDINATOR ? clock_thread_ns() : 0;
}
// ... to here.
static inline void coordinator_time_end(bhvd_context *ctx, int64_t begin_ns)
{
    if (begin_ns)
        ctx->counters.coordinator_ns += (uint64_t)(clock_thread_ns() - begin_ns);
}
