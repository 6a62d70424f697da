/* Ops BaguaHvdBridgePut and BaguaHvdBridgeWait: pass tensors of a graph to Python in place, and take them back.
 *
 * Put passes a tensor to Python (core.python_put) once it exists; Python's reducer communicates it in place. Wait
 * takes the outputs of all puts, lets Python finish (core.python_wait), and outputs the same memory, now with results.
 */
#pragma once

#include "tensorflow/tf_api.h"

/* Registers them; false: *status has the reason. */
bool bridge_register(TF_Status *status);
