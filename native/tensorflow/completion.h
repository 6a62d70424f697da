/* Completes the ops whose collectives have ended: one thread waits for all, so that no thread of TensorFlow does.
 *
 * An op that is registered here has returned from its kernel. TensorFlow continues with other ops, even with a single
 * inter-op thread. So every collective with its input available is posted, in whatever order the ranks reach them.
 * docs/decisions/frontends.md.
 */
#pragma once

#include "tensorflow/core.h"
#include "tensorflow/tf_api.h"

#include <stdbool.h>

/* The callback by which a kernel tells TensorFlow that it is done, kept after the kernel has returned. */
struct done {
    void *storage[4];
    TF_AsyncOpKernelDoneCallback *callback;
    bool moved;
};

/* Keeps `callback`. False: not possible with this TensorFlow; call it before the kernel returns. */
bool done_keep(struct done *done, TF_AsyncOpKernelDoneCallback *callback);

/* One posted operation of an op. `finish` is called once, when it has ended, from any thread: it sets the outputs or
 * the failure, and frees the operation with its resources; then the callback is called. */
struct completion {
    struct done done;
    bhvd_handle *handle;
    void (*finish)(struct completion *, bhvd_status status, const struct bhvd_error *error);
};

/* Counts an operation as in progress. Call it while core_acquire prevents a change of the context. */
void completion_begin(void);
void completion_end(void);      /* only for operations that are not passed to one of the next two */
/* Takes ownership of a posted operation. */
void completion_add(struct completion *completion);
/* The same on the calling thread: returns when the operation has ended and the callback has been called. */
void completion_wait(struct completion *completion);
/* Blocks until no operation is in progress. */
void completion_drain(void);
