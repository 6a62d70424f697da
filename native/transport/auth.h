// Mutual proof that both ends of a connection know the job's secret, in one message each way.
//
//     caller, the higher rank -> callee   struct introduction
//     callee -> caller                    a proof
//
//     proofs of all channels, 32 bytes each = SHAKE256(HMAC-SHA256(secret, the sender's endpoint, the receiver's endpoint))
//
// Python makes all proofs at the start (bagua_hvd/core/context.py), from the endpoints that the ranks gathered over authenticated
// connections. An endpoint holds rank, address, port and a nonce of this init(). So a proof of another job, init(), direction,
// rank, port or channel is wrong. A callee takes each channel once, so it refuses a repeated one. Later bytes are neither encrypted
// nor authenticated (docs/security.md).
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "transport/socket.h"

// CHANNEL_DATA + i is data channel i. CHANNEL_LOCAL: a UNIX connection within a host.
enum channel_kind { CHANNEL_CONTROL = 0, CHANNEL_LOCAL = 1, CHANNEL_DATA = 2 };

struct introduction {
    int32_t caller;
    uint32_t channel;
    uint32_t data_channels;             // number of data channels to this rank; on its control channel
    uint8_t proof[BHVD_PROOF_BYTES];
};

bool auth_matches(const uint8_t proof[BHVD_PROOF_BYTES], const uint8_t expected[BHVD_PROOF_BYTES]);
// Explains why a handshake failed. Returns status.
bhvd_status auth_explain(bhvd_status status, struct bhvd_error *error);

// A rank's description for the others, which all ranks gather when they start.
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
    uint8_t nonce[32];                  // also the name of its UNIX socket
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
