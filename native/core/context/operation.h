// An operation: the arguments and state of a bhvd_post. Its collective (executor/collective.h) is the part that the executor needs.
// Its references are the caller's bhvd_handle and, until it completes, the engine's.
#pragma once

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>

#include "core/message/request.h"
#include "executor/collective.h"

// Whether it is complete, and if not, whether a thread sleeps until then: a wake-up is a system call.
enum operation_state { OPERATION_RUNS, OPERATION_RUNS_AWAITED, OPERATION_COMPLETE };

struct completion;

// Its progress on this rank. A proxy of a joined rank is never requested.
enum operation_phase {
    OPERATION_POSTED,
    OPERATION_REQUESTED,        // sent to the coordinator, or to its neighbors
    OPERATION_AGREED,           // it is part of an execution
    OPERATION_EXECUTING         // running: only the execution ends it
};

struct bhvd_operation {
    atomic_int references;
    bhvd_context *ctx;
    struct bhvd_operation *next;        // in the list of posted operations
    struct table_node by_name;          // in ctx->names
    struct operation_key key;           // its name lies inside `request`; a proxy has none
    struct collective coll;             // its tensors follow this struct
    struct bytes request;               // in wire format, see core/message/request.h; equal bytes mean equal requests
    struct lru_entry *cached;           // the entry by which it was requested, or which its response created
    const int64_t *response_numbers;    // added by the response, see core/negotiation/member.h
    size_t response_number_count;
    int64_t *response_numbers_owned;    // to be freed; NULL when they lie in `cached`
    unsigned char *inline_sum;          // the sum that came with the response (inline_payload.h); NULL: execute it
    int32_t *received_splits;           // alltoall: received_size entries for each tensor
    size_t received_size;
    int64_t value;
    enum operation_phase phase;         // engine only
    bool is_pairwise;                   // requested from its neighbors, not from the coordinator (pairwise.h)
    _Atomic uint32_t state;             // futex word, of enum operation_state
    struct completion *_Atomic completion;      // in bhvd_completions; NULL: none
    struct bhvd_error error;
    struct tensor tensors[];
};

static inline struct bhvd_operation *operation_of(struct collective *coll)
{
    return (struct bhvd_operation *)(void *)((char *)coll - offsetof(struct bhvd_operation, coll));
}

// With a result, or an error: from now on bhvd_wait returns. Releases the engine's reference; the name may be used again.
void operation_complete(struct bhvd_operation *op, const struct bhvd_error *error);
void operation_release(struct bhvd_operation *op);
// Once this returns true, `error` is final.
static inline bool operation_is_complete(const struct bhvd_operation *op)
{
    return atomic_load(&op->state) == OPERATION_COMPLETE;
}
// Sleeps until another thread has completed it, with spurious wake-ups; CLOCK_NEVER: no deadline.
void operation_sleep(struct bhvd_operation *op, int64_t deadline_ns);

// Is there an operation that was requested from the coordinator and has no response?
bool operation_awaits_response(bhvd_context *ctx);

// The operation in progress with this key, or NULL. Takes post_lock.
struct bhvd_operation *operation_find(bhvd_context *ctx, const struct operation_key *key);
struct bhvd_operation *operation_find_locked(bhvd_context *ctx, const struct operation_key *key);   // with post_lock held

// alltoall: rows of the tensor that this rank sends to member i of `size`.
static inline int64_t operation_split(const struct bhvd_operation *op, const struct tensor *tensor, int i, int size)
{
    return op->coll.args.splits ? op->coll.args.splits[i] : tensor->dim0 / size;
}
