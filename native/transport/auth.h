// Mutual proof that both ends of a connection know the job's secret and agree on what the connection is for, in one message each way.
//
//     caller -> callee   struct introduction: a hello, and the caller's proof
//     callee -> caller   the callee's proof
//
//     proof = HMAC-SHA256(secret, hello, role (i32), callee (i32), the callee's port (i32), the caller's nonce, the callee's nonce)
//
// Each rank draws a nonce in each init(). Ranks learn the others' with their addresses, over the rendezvous, which is authenticated
// too. So a proof of another job or another init() is wrong; so are a reflected one (its role) and a relayed one (ranks and port).
// A callee takes each channel once, so it refuses a repeated one. The secret is never sent. Later bytes are not encrypted (docs/security.md).
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "bagua_hvd.h"
#include "base/hmac.h"
#include "transport/socket.h"

enum auth_role { AUTH_CALLER = 'c', AUTH_CALLEE = 'a' };
enum { AUTH_NONCE_SIZE = 32, AUTH_PROOF_SIZE = SHA256_SIZE };

// CHANNEL_DATA + i is data channel i. CHANNEL_LOCAL: a UNIX connection within a host.
enum channel_kind { CHANNEL_CONTROL = 0, CHANNEL_LOCAL = 1, CHANNEL_DATA = 2 };

struct hello {
    int32_t caller;
    uint32_t channel;
    uint32_t data_channels;             // number of data channels to this rank; on its control channel
};

struct introduction {
    struct hello hello;
    uint8_t proof[AUTH_PROOF_SIZE];
};

// A rank, as all others know it.
struct address {
    char host[HOST_SIZE];
    int32_t port;
    int data_channels;                  // number of data channels that it and this rank have set; 0: neither did
    uint8_t nonce[AUTH_NONCE_SIZE];
};

struct auth_keys {
    const void *secret;
    size_t secret_size;
    const struct address *addresses;    // by rank
};

void auth_prove(const struct auth_keys *keys, enum auth_role role, const struct hello *hello, int callee,
                uint8_t proof[AUTH_PROOF_SIZE]);
// BHVD_ERR_AUTH: this is not that proof.
bhvd_status auth_check(const struct auth_keys *keys, enum auth_role role, const struct hello *hello, int callee,
                       const uint8_t proof[AUTH_PROOF_SIZE], struct bhvd_error *error);
// Explains why the bytes of a handshake did not arrive. Returns status.
bhvd_status auth_explain(bhvd_status status, struct bhvd_error *error);
