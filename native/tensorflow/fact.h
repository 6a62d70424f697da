/* Op BaguaHvdFact: size, rank and so on, as they are when the graph runs. */
#pragma once

#include "bagua_hvd.h"
#include "tensorflow/tf_api.h"

/* Registers it; false: *status says why not. */
bool fact_register(TF_Status *status);

/* The number called `name`; BHVD_OK, or why there is none, with a sentence. */
bhvd_status fact_value(const char *name, int32_t process_set, int32_t *value, const char **message);
