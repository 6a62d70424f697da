#include "base/status.h"

#include <stdio.h>

bhvd_status error_vset(struct bhvd_error *error, bhvd_status status, const char *format, va_list args)
{
    if (error) {
        error->status = status;
        error_blame(error, BHVD_CAUSE_NONE, -1);
        vsnprintf(error->message, sizeof error->message, format, args);
    }
    return status;
}

bhvd_status error_set(struct bhvd_error *error, bhvd_status status, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    error_vset(error, status, format, args);
    va_end(args);
    return status;
}

void error_clear(struct bhvd_error *error)
{
    if (error) {
        error->status = BHVD_OK;
        error_blame(error, BHVD_CAUSE_NONE, -1);
        error->message[0] = '\0';
    }
}
