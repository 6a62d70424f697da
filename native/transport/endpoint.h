// A rank's description for the others, which all ranks gather when they start.
#pragma once

#include <stdint.h>

#include "transport/socket.h"

enum {
    ENDPOINT_MAGIC = 0x43484742,        // "BGHC", also detects another byte order
    ENDPOINT_PROTOCOL = 6,              // raise it with each change of the messages between ranks
    ENDPOINT_ID_SIZE = 192
};

// All versions have the first three fields, so that versions can be compared.
struct endpoint {
    uint32_t magic;
    uint32_t protocol;
    char version[24];                   // of the package
    int32_t rank, port;
    int32_t data_channels;              // at most this many to each peer; 0: not set
    char host[HOST_SIZE];
    char host_id[ENDPOINT_ID_SIZE];     // empty: shares no memory
    uint8_t nonce[32];                  // auth.h; also the name of its UNIX socket
    char allreduce_path[16];            // must be the same everywhere
    int32_t uses_mpi;                   // same
    char negotiation[8];                // same
    int32_t negotiation_fanout;         // same
};

// The smaller of the numbers that the two set; 0: neither set one, and the higher rank chooses after its control connection.
static inline int endpoint_data_channels(const struct endpoint *one, const struct endpoint *other)
{
    const int a = one->data_channels, b = other->data_channels;
    return a && (!b || a < b) ? a : b;
}
