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

#include "bagua_hvd.h"

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
