/* The native core for the ops: functions and a context that Python passes.
 *
 * The core is in the cffi module, which hides its symbols. So this library asks for functions by name, and Python
 * (bagua_hvd/tensorflow/native_ops.py) fills the table once, and sets the context after every init() and shutdown().
 * These are the only globals of the project's C: TensorFlow offers kernels no other way to find them.
 */
#pragma once

#include "bagua_hvd.h"

/* X(name without bhvd_): of bagua_hvd.h */
#define CORE_FUNCTIONS(X) \
    X(post) X(wait) X(completions_create) X(completions_add) X(completions_next) X(handle_value) X(handle_drop) \
    X(result_take) X(result_free) X(received_splits) X(process_set_size) X(process_set_rank)

#define CORE_MEMBER(name) __typeof__(bhvd_##name) *name;
struct core {
    CORE_FUNCTIONS(CORE_MEMBER)

    /* Python's side of the bridge (bagua_hvd/tensorflow/bridge.py), called without the GIL. Each returns a bhvd_status and
     * fills the error. put: tensor `index` of bridge `id` is available; src == dst, alive until bhvd_tf_release(memory),
     * which Python calls once, whatever put returned. wait: blocks until the memory of all tensors put holds results. */
    int (*python_put)(int64_t id, int64_t index, const struct bhvd_tensor *tensor, void *memory, struct bhvd_error *error);
    int (*python_wait)(int64_t id, struct bhvd_error *error);
};
#undef CORE_MEMBER

extern struct core core;

/* Properties of the job that the core does not know. */
struct core_job { int32_t local_rank, local_size; };

/* The context for one call; blocks bhvd_tf_set_context until core_release. NULL before init(): call core_release even
 * then. */
bhvd_context *core_acquire(struct core_job *job);
void core_release(void);

#define CORE_NOT_INITIALIZED "Horovod has not been initialized; use hvd.init()."
