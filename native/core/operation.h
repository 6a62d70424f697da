// An operation: what bhvd_post was given, from posting to its end. It is the public bhvd_handle.
// Held by the caller's handle and, while it runs, by the engine.
#ifndef BHVD_OPERATION_H
#define BHVD_OPERATION_H

#include <stdatomic.h>
#include <stdbool.h>

#include "bagua_hvd.h"
#include "base/bytes.h"
#include "base/table.h"

enum {
    OPERATION_KINDS = BHVD_PROCESS_SET_REMOVE + 1,
    REPLICAS = 3                        // own, left, right
};

// Whether it ended, and if not, whether anyone sleeps for it: to wake somebody is a system call.
enum operation_state { OPERATION_RUNS, OPERATION_RUNS_AWAITED, OPERATION_ENDED };

struct tensor {
    const void *src;
    void *dst;                  // NULL: a result is to be allocated
    size_t count, nbytes;
    int64_t dim0;
    size_t row_nbytes;          // of one index of dim 0
    bhvd_dtype dtype;
    void *result;               // allocated by the core, owned until taken
    size_t result_nbytes;
    int64_t result_dim0;
};

struct bhvd_handle {
    atomic_int references;
    bhvd_context *ctx;
    struct bhvd_handle *next;           // in the list of posted operations
    struct table_node by_name;          // in ctx->names
    bhvd_kind kind;
    uint32_t process_set;               // its number
    const char *name;                   // inside `request`, not 0-terminated
    uint16_t name_size;
    bhvd_op op;
    int root_rank;
    double prescale_factor, postscale_factor;
    bhvd_codec codec;
    struct bhvd_codec_options codec_options;
    bhvd_exchange exchange;
    bhvd_topology topology;
    int round;
    bool hierarchical;
    float *replicas[REPLICAS];
    bhvd_mirror *replica_mirrors[REPLICAS];     // of these; NULL: none
    double before[1 + REPLICAS], after[1 + REPLICAS];   // of values, own, left, right
    bool mixes_before, mixes_after;             // do they matter?
    float *worker_error, *server_error;
    bhvd_mirror *worker_mirror, *server_mirror; // of these, where a GPU may have the newest values; NULL: none
    int32_t *splits;
    size_t split_count;
    struct bytes request;               // as it travels, see core/request.h; equal bytes mean an equal request
    struct cache_entry *cached;         // the entry it was announced by, or that its response made
    const int64_t *agreed;              // what the response adds, see core/negotiation.h
    size_t agreed_count;
    int64_t *agreed_owned;              // to be freed; NULL when `agreed` lies in `cached`
    bool on_gpu;                        // on all members; a phantom's own memory is the host's nevertheless
    struct staging *staging;            // of tensors on a GPU (device/staging.h); NULL: they are in the host's memory
    int32_t *received_splits;           // alltoall: received_size entries for each tensor
    size_t received_size;
    int64_t value;
    bool announced, answered;           // the coordinator was told; its answer came (engine only)
    bool executing;                     // its execution runs: only that ends it
    bool phantom;                       // stands in for a rank that joined: zeros in, nothing out
    _Atomic uint32_t state;             // futex word, of enum operation_state
    struct bhvd_error error;
    size_t tensor_count;
    struct tensor tensors[];
};

struct operation_key {
    uint32_t process_set;       // its number, which is never reused
    uint16_t name_size;
    const char *name;
};

// Copies the arguments; checks all that one rank can know by itself (spec: which exception, where).
bhvd_status operation_create(bhvd_context *ctx, const struct bhvd_args *args, struct bhvd_handle **out,
                             struct bhvd_error *error);
// Ends it: from now on bhvd_wait returns. The engine's reference is dropped, and the name is free again.
void operation_end(struct bhvd_handle *operation, const struct bhvd_error *error);
void operation_drop(struct bhvd_handle *operation);
// From when this is true, `error` is final.
static inline bool operation_is_over(const struct bhvd_handle *operation)
{
    return atomic_load(&operation->state) == OPERATION_ENDED;
}
// Sleeps, mostly until another thread has ended it; CLOCK_NEVER: no deadline.
void operation_sleep(struct bhvd_handle *operation, int64_t deadline_ns);
// Ends all operations in flight on a process set that is being removed.
void operation_end_set(bhvd_context *ctx, uint32_t process_set);

uint64_t operation_hash(const struct operation_key *key);
// The operation in flight with this key, or NULL. Takes post_lock.
struct bhvd_handle *operation_find(bhvd_context *ctx, const struct operation_key *key);

// Elements of one tensor at most: products with element sizes stay far from overflow.
#define OPERATION_COUNT_MAX (1LL << 56)
bool operation_needs_tensors(bhvd_kind kind);

// What the sum over the members of a set is multiplied by.
static inline double operation_sum_factor(const struct bhvd_handle *op, int size)
{
    return op->postscale_factor / (op->op == BHVD_OP_AVERAGE ? size : 1);
}

// Allocates the result of a tensor posted with dst NULL and points dst at it.
bhvd_status operation_allocate_result(struct tensor *tensor, int64_t dim0);

// The kind's word in error messages: "ALLREDUCE" and "Allreduce".
const char *operation_kind_name(bhvd_kind kind, bhvd_op op);
const char *operation_kind_word(bhvd_kind kind);

#endif
