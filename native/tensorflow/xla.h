/* The custom calls that stand for the ops in programs compiled by XLA. */
#pragma once

/* Registers them. NULL on success, else what the installed TensorFlow lacks for that. */
const char *xla_calls_register(void);
