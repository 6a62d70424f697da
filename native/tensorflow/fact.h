/* Op BaguaHvdFact: size, rank and so on, read when the graph runs. */
#pragma once

#include "bagua_hvd.h"
#include "tensorflow/tf_api.h"

/* Registers it; false: *status has the reason. */
bool fact_register(TF_Status *status);

/* The number called `name`; returns BHVD_OK, or an error with *message set. */
bhvd_status fact_value(const char *name, int32_t process_set, int32_t *value, const char **message);
