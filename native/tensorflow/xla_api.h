/* XLA's registry of custom calls, found in the loaded TensorFlow by its C++ names. */
#pragma once

#include <stddef.h>

typedef struct xla_status xla_status;

/* A custom call with several results (outs) and the text that the graph passes to it, which is not 0-terminated. */
typedef void xla_function(void **outs, const void **ins, const char *text, size_t nchars, xla_status *status);

/* Registers a custom call for the CPU. NULL on success, else the missing part. */
const char *xla_register(const char *name, xla_function *function);

/* Makes the program fail. */
void xla_fail(xla_status *status, const char *message);
