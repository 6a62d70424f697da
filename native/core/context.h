// The state of one rank, and who may touch which part of it:
//
//     posting side    any thread, under `post_lock`: posted operations, names in flight, failure
//     engine          whoever holds `engine_lock` (progress.h): links, negotiation, cache, executions
//     process sets    written by the engine, read by any thread, under `sets_lock`
#ifndef BHVD_CONTEXT_H
#define BHVD_CONTEXT_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>

#include "bagua_hvd.h"
#include "base/table.h"
#include "core/coordinator.h"
#include "core/heartbeat.h"
#include "core/late.h"
#include "core/process_set.h"
#include "core/relay.h"
#include "core/response_cache.h"
#include "core/timeline.h"
#include "kernel/kernel.h"
#include "transport/connect.h"

// Written by the engine, read by any thread at any time.
struct engine_counters {
    _Atomic uint64_t operations, executions, payload_bytes_sent, payload_bytes_received, cache_hits, cache_misses, coordinator_ns,
        negotiation_messages;
};

struct fusion_buffer {
    void *data;
    size_t size;
};

struct bhvd_context {
    struct bhvd_context_options options;        // without strings and secret
    struct connections connections;
    struct kernel_table kernels;
    int allreduce_path;                         // enum allreduce_path (collective/collective.h)

    pthread_mutex_t post_lock;
    struct bhvd_handle *posted_head, **posted_tail;
    _Atomic uint32_t posted_count;              // of the list, so that the engine looks without the lock
    struct table names;                         // operations in flight on this rank, by set and name
    struct bhvd_error closing;                  // why nothing more can be posted; BHVD_OK while usable
    struct bhvd_error failure;                  // why nothing more can be executed either; written by the engine
    _Atomic uint32_t outstanding;               // posted and not ended
    _Atomic bool closed;                        // shutdown asked for

    pthread_mutex_t engine_lock;
    pthread_t progress_thread;
    bool progress_thread_runs;
    struct pollfd *poll_fds;                    // the engine's; the progress thread sleeps with its own copy
    int spin_limit, yield_limit;                // rounds of looking, and of yielding, before the engine sleeps
    _Atomic int waiting;                        // threads that block for an operation
    struct coordinator coordinator;
    struct relay relay;
    struct bytes request_frame;                 // the requests being announced
    bool said_goodbye;
    bool failed_elsewhere;                      // another rank's goodbye told of the failure
    struct response_cache cache;
    struct timeline timeline;
    struct bhvd_handle *staged_head;            // their tensors are on the way from a GPU (device/staging.h)
    bool waits_for_gpu;                         // an execution does (collective/nccl.h)
    struct execution *executions_head, **executions_tail;
    uint64_t executing;                         // the number of the one that runs; 0: none
    struct heartbeat heartbeat;
    uint32_t waits_for_nothing;                 // calls of progress_until that did not wait
    uint64_t messages_moved;                    // bytes of them, both ways
    struct fusion_buffer scratch[2];            // fusion.h
    _Atomic bool measures_coordinator;
    struct engine_counters counters;            // links count bytes too, see bhvd_context_counters
    struct late late;
    bool abandoned;                             // in a child after fork

    pthread_mutex_t sets_lock;
    struct process_set_table sets;
};

// From now on nothing can be posted; ends, with this error, the operations that the coordinator has not answered.
// Those that it has answered are still executed: every member counts on the others for them. Engine only.
void context_close(bhvd_context *ctx, bhvd_status status, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

// Marks the context unusable, ends every operation in flight with this error, and returns its status. Engine only.
// The first failure stays: later ones are consequences.
bhvd_status context_fail(bhvd_context *ctx, bhvd_status status, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
// The same, because this rank sent something that makes no sense.
bhvd_status context_fail_protocol(bhvd_context *ctx, int rank);

#endif
