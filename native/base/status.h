// Errors: a status for programs, a sentence for people.
#ifndef BHVD_STATUS_H
#define BHVD_STATUS_H

#include <stdarg.h>

#include "bagua_hvd.h"

// Fills *error (NULL is fine) with the status and the formatted sentence, and returns the status:
//     return error_set(error, BHVD_ERR_ARGUMENT, "root rank %d is not in process set %d", root, id);
bhvd_status error_set(struct bhvd_error *error, bhvd_status status, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

// BHVD_OK and an empty sentence.
void error_clear(struct bhvd_error *error);

#endif
