/* Ends the ops whose collective has ended: one thread waits, so that no thread of TensorFlow does.
 *
 * An op that is registered here has returned from its kernel. TensorFlow goes on with other ops, also with one inter-op
 * thread, and so every collective whose input is there gets posted, in whatever order the ranks reach them.
 * docs/decisions: 0009-tensorflow-ops.md.
 */
#pragma once

#include "tensorflow/core.h"
#include "tensorflow/tf_api.h"

#include <stdbool.h>

/* The callback by which a kernel tells TensorFlow that it is done: kept beyond the call that brought it. */
struct done {
    void *storage[4];
    TF_AsyncOpKernelDoneCallback *callback;
    bool moved;
};

/* Keeps `callback`. False: it cannot be kept on this TensorFlow, run it before the kernel returns. */
bool done_keep(struct done *done, TF_AsyncOpKernelDoneCallback *callback);

/* One posted operation of an op. `finish` is called once, when it ended, from any thread: it sets the outputs or the
 * failure and frees the operation with what it holds; then TensorFlow is told. */
struct completion {
    struct done done;
    bhvd_handle *handle;
    void (*finish)(struct completion *, bhvd_status status, const struct bhvd_error *error);
};

/* Counts an operation as in progress, while core_acquire holds off a change of the context. */
void completion_begin(void);
void completion_end(void);      /* for operations that are not given to one of the next two */
/* Takes a posted operation over. */
void completion_add(struct completion *completion);
/* The same on the calling thread: returns when the operation has ended and TensorFlow knows. */
void completion_wait(struct completion *completion);
/* Blocks until no operation is in progress. */
void completion_drain(void);
