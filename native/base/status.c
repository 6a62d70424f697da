#include "base/status.h"

#include <stdio.h>

bhvd_status error_set(struct bhvd_error *error, bhvd_status status, const char *format, ...)
{
    if (error) {
        va_list args;
        error->status = status;
        va_start(args, format);
        vsnprintf(error->message, sizeof error->message, format, args);
        va_end(args);
    }
    return status;
}

void error_clear(struct bhvd_error *error)
{
    if (error) {
        error->status = BHVD_OK;
        error->message[0] = '\0';
    }
}
