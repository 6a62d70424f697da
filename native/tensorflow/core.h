/* The native core for the ops: functions and a context that Python passes.
 *
 * The core is in the cffi module, which hides its symbols. So this library asks for functions by name, and Python
 * (bagua_hvd/tensorflow/native_ops.py) fills the table once, and sets the context after every init() and shutdown().
 * These are the only globals of the project's C: TensorFlow offers kernels no other way to find them.
 */
#pragma once

#include "bagua_hvd.h"

/* X(result, name without bhvd_, parameters): prototypes as in bagua_hvd.h */
#define CORE_FUNCTIONS(X) \
    X(bhvd_status, post, (bhvd_context *, const struct bhvd_args *, bhvd_handle **, struct bhvd_error *)) \
    X(bhvd_status, wait, (bhvd_handle *, int timeout_ms, struct bhvd_error *)) \
    X(bhvd_completions *, completions_create, (void)) \
    X(bhvd_status, completions_add, (bhvd_completions *, bhvd_handle *, int64_t number)) \
    X(int64_t, completions_next, (bhvd_completions *, int timeout_ms)) \
    X(int64_t, handle_value, (bhvd_handle *)) \
    X(void, handle_drop, (bhvd_handle *)) \
    X(bhvd_status, result_take, (bhvd_handle *, size_t index, struct bhvd_result *)) \
    X(void, result_free, (void *)) \
    X(bhvd_status, received_splits, (bhvd_handle *, size_t index, int32_t *splits, size_t count)) \
    X(int, process_set_size, (bhvd_context *, int id)) \
    X(int, process_set_rank, (bhvd_context *, int id))

/* Python's side of the bridge (bagua_hvd/tensorflow/bridge.py), called without the GIL. Each returns a bhvd_status and
 * fills the error. put: tensor `index` of bridge `id` is available; src == dst, alive until bhvd_tf_release(memory),
 * which Python calls once, whatever put returned. wait: blocks until the memory of all tensors put holds results. */
#define CORE_PYTHON_FUNCTIONS(X) \
    X(int, python_put, (int64_t id, int64_t index, const struct bhvd_tensor *tensor, void *memory, \
                        struct bhvd_error *error)) \
    X(int, python_wait, (int64_t id, struct bhvd_error *error))

#define CORE_MEMBER(result, name, parameters) result (*name) parameters;
struct core { CORE_FUNCTIONS(CORE_MEMBER) CORE_PYTHON_FUNCTIONS(CORE_MEMBER) };
#undef CORE_MEMBER

extern struct core core;

/* Properties of the job that the core does not know. */
struct core_job { int32_t local_rank, local_size; };

/* The context for one call; blocks bhvd_tf_set_context until core_release. NULL before init(): call core_release even
 * then. */
bhvd_context *core_acquire(struct core_job *job);
void core_release(void);

#define CORE_NOT_INITIALIZED "Horovod has not been initialized; use hvd.init()."
