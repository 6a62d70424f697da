// A blocking client of the core's sockets, for tests.
#pragma once

#include <poll.h>
#include <unistd.h>

#include "transport/socket.h"

// One attempt. BHVD_ERR_TIMEOUT: no reply; else errors as of socket_connect_begin.
static bhvd_status socket_connect(const char *host, int port, int64_t deadline_ns, int *fd, struct bhvd_error *error)
{
    bhvd_status status = socket_connect_begin(host, port, NULL, fd, error);
    if (status)
        return status;
    if (socket_await(*fd, POLLOUT, deadline_ns) == BHVD_ERR_TIMEOUT)
        status = BHVD_ERR_TIMEOUT;
    else
        status = socket_connect_complete(*fd, host, port, error);
    if (status)
        close(*fd);
    return status;
}
