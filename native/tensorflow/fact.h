/* Op BaguaHvdFact: size, rank and so on, as they are when the graph runs. */
#ifndef BHVD_TENSORFLOW_FACT_H
#define BHVD_TENSORFLOW_FACT_H

#include "tensorflow/tf_api.h"

/* Registers it; false: *status says why not. */
bool fact_register(TF_Status *status);

#endif
