// Functions that the files of this folder share, and tests.
//
// The engine makes operations progress. One thread at a time holds ctx->engine_lock and runs it: the progress thread, or,
// when that sleeps, a thread that waits for its operation (so a blocking call needs no switch between threads). A waiting thread
// that finds the lock taken sleeps until its own operation has ended: the progress thread takes over from the thread that has it.
#pragma once

#include "core/context/context.h"
#include "gpu/nccl.h"

// Properties of the operation's process set at lookup: the set may change or be removed later.
struct set_facts {
    int size, rank;
    uint32_t number;
    struct nccl_facts nccl;
};

// arguments.c. The checks of a posted operation that one rank can make alone; the coordinator checks that ranks agree. *facts: set
// on success. Does not check that the name is unique.
bhvd_status arguments_check(bhvd_context *ctx, const struct bhvd_args *args, struct set_facts *facts,
                            struct bhvd_error *error);

// context.c, in steps that tests call one by one. Creates everything except the connections, the parts that need them, and the
// progress thread.
bhvd_status context_new(const struct bhvd_context_options *options, bhvd_context **out, struct bhvd_error *error);
// Creates the parts that need the connections: coordinator, relay, heartbeats. BHVD_ERR_SYSTEM: no memory.
bhvd_status context_prepare(bhvd_context *ctx);

// progress.c. Starts the progress thread.
bhvd_status progress_start(bhvd_context *ctx, struct bhvd_error *error);
// Stops it: says goodbye to all peers, ends operations in progress.
void progress_stop(bhvd_context *ctx);

// Waits for the end of the operation, and makes progress on this thread if no other thread does.
void progress_wait(struct bhvd_operation *op, int64_t deadline_ns);
