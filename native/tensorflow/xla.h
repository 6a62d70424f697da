/* The custom calls that stand for the ops in programs compiled by XLA. */
#ifndef BHVD_TENSORFLOW_XLA_H
#define BHVD_TENSORFLOW_XLA_H

/* Registers them. NULL on success, else what the installed TensorFlow lacks for that. */
const char *xla_calls_register(void);

#endif
