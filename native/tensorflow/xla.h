/* The custom calls that replace the ops in programs compiled by XLA. */
#pragma once

/* Registers them. NULL on success, else the part of the installed TensorFlow that is missing. */
const char *xla_calls_register(void);
