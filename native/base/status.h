// Errors: a status for programs, a message for people.
#pragma once

#include <stdarg.h>

#include "bagua_hvd.h"

// Internal: a peer broke the protocol; BHVD_ERR_SYSTEM always means this process. executor_fail_protocol turns it into
// BHVD_ERR_SYSTEM with BHVD_CAUSE_PROTOCOL before anybody outside of the core sees it.
#define BHVD_ERR_PROTOCOL ((bhvd_status)(BHVD_ERR_SYSTEM + 1))

// Fills *error (NULL is fine) with the status and the formatted message, sets no cause, and returns the status:
//     return error_set(error, BHVD_ERR_ARGUMENT, "root rank %d is not in process set %d", root, id);
bhvd_status error_set(struct bhvd_error *error, bhvd_status status, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

bhvd_status error_vset(struct bhvd_error *error, bhvd_status status, const char *format, va_list args);

// Adds cause and rank to an error that has been set. *error is not NULL.
static inline void error_blame(struct bhvd_error *error, bhvd_cause cause, int rank)
{
    error->cause = cause;
    error->rank = rank;
}

// BHVD_OK and an empty message.
void error_clear(struct bhvd_error *error);
