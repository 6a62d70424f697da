/* Ops BaguaHvdAllreduce, ...Allgather, ...Broadcast, ...Alltoall, ...Reducescatter, ...Barrier. */
#pragma once

#include "tensorflow/tf_api.h"

/* Registers them; false: *status has the reason. */
bool collective_register(TF_Status *status);
