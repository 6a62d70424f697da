// Messages of an execution, in posting order.
#pragma once

#include "transport/link.h"

static inline void post_send(struct link *link, uint32_t execution, struct transfer *transfer, const void *buffer, size_t size)
{
    link_send_numbered(link, execution, link_number_send(link, execution), transfer, buffer, size, NULL, false);
}

static inline void post_recv(struct link *link, uint32_t execution, struct transfer *transfer, void *buffer, size_t size)
{
    link_recv_numbered(link, execution, link_number_recv(link, execution), transfer, buffer, size, NULL);
}
