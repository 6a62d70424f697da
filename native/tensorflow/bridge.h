/* Ops BaguaHvdBridgePut and BaguaHvdBridgeWait: tensors of a graph, given to Python where they lie and taken back.
 *
 * Put hands a tensor to Python (core.python_put) as soon as it exists; Python's reducer communicates it in place. Wait
 * takes what all puts yielded, asks Python (core.python_wait) to finish, and yields the same memory, now with results.
 */
#pragma once

#include "tensorflow/tf_api.h"

/* Registers them; false: *status says why not. */
bool bridge_register(TF_Status *status);
