/* Ops BaguaHvdAllreduce, ...Allgather, ...Broadcast, ...Alltoall, ...Reducescatter, ...Join, ...Barrier. */
#ifndef BHVD_TENSORFLOW_COLLECTIVE_H
#define BHVD_TENSORFLOW_COLLECTIVE_H

#include "tensorflow/tf_api.h"

/* Registers them; false: *status says why not. */
bool collective_register(TF_Status *status);

#endif
