// Mutual proof that both ends of a connected stream socket know the job's secret and agree on the purpose of the connection,
// before any other byte is parsed.
//
//     both ways    hello: magic, version (4 bytes each), the sender's rank (u32; 2^32 - 1: it has none), a random nonce (32 bytes)
//     both ways    proof: HMAC-SHA256(secret, role, purpose, caller, callee, port, own nonce, peer's nonce)
//
// Role and purpose are a byte each, the others u32, little-endian. The proof is checked in constant time. The role differs between
// the side that connected (the caller) and the one that accepted (the callee), so a reflected message proves nothing; nonces are
// fresh, so a replayed one proves nothing. The purpose, both ranks and the callee's port are in the proof, so if a rank connects to
// a stranger by mistake, the stranger cannot relay the handshake to another port. The secret is never sent. Later bytes are not
// encrypted (docs/security.md).
// A side sends its proof before it has verified the other's, so both learn that their secrets differ.
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "bagua_hvd.h"
#include "base/hmac.h"

enum auth_role { AUTH_CONNECTED = 'c', AUTH_ACCEPTED = 'a' };
enum auth_purpose { AUTH_CHANNEL = 'c', AUTH_LOCAL = 'l' };
enum { AUTH_NO_RANK = -1 };

// The purpose of a connection. The side that accepts learns the caller from its hello.
struct auth_binding {
    enum auth_purpose purpose;
    int32_t caller, callee;
    int32_t port;                           // of the callee's listener; 0: a UNIX socket
};

// Blocks until both sides are convinced, at most until deadline_ns (base/clock.h). fd may be blocking or not, and keeps
// its mode. On any error the caller closes fd.
// BHVD_ERR_AUTH: the secrets or the bindings (purpose, ranks, port) of the two sides differ. BHVD_ERR_TIMEOUT. BHVD_ERR_PEER_LOST:
// the other side hung up or sent garbage. BHVD_ERR_SYSTEM: the machine gave no random bytes.
bhvd_status auth_handshake(int fd, enum auth_role role, const struct auth_binding *binding, const void *secret, size_t secret_size,
                           int64_t deadline_ns, struct bhvd_error *error);
// Explains why handshake bytes did not arrive. Returns status.
bhvd_status auth_explain(bhvd_status status, struct bhvd_error *error);

// The same handshake in non-blocking steps. The caller speaks first.
enum { AUTH_NONCE_SIZE = 32, AUTH_HELLO_SIZE = 12 + AUTH_NONCE_SIZE, AUTH_PROOF_SIZE = SHA256_SIZE };

struct auth {
    enum auth_role role;
    struct auth_binding binding;
    uint8_t hello[AUTH_HELLO_SIZE];         // to send, after auth_begin
    uint8_t proof[AUTH_PROOF_SIZE];         // to send, after auth_receive_hello
    uint8_t expected[AUTH_PROOF_SIZE];      // the bytes that a peer sends if it knows the secret
    bool has_hello;                         // the peer's; its proof comes next
    size_t moved;                           // bytes of the next message
    uint8_t message[AUTH_HELLO_SIZE];
};

// Begins on the connecting side, and sends its hello. BHVD_ERR_SYSTEM, BHVD_ERR_PEER_LOST.
bhvd_status auth_call(struct auth *auth, int fd, const struct auth_binding *binding, struct bhvd_error *error);
// Responds to the peer's bytes. BHVD_OK: it has proven the secret. BHVD_IN_PROGRESS: more must arrive. Else as auth_handshake.
bhvd_status auth_advance(struct auth *auth, int fd, const void *secret, size_t secret_size, struct bhvd_error *error);

// Its steps. BHVD_ERR_SYSTEM.
bhvd_status auth_begin(struct auth *auth, enum auth_role role, const struct auth_binding *binding, struct bhvd_error *error);
// BHVD_ERR_PEER_LOST: not a hello of this version.
bhvd_status auth_receive_hello(struct auth *auth, const uint8_t peer_hello[AUTH_HELLO_SIZE], const void *secret,
                               size_t secret_size, struct bhvd_error *error);
// BHVD_ERR_AUTH.
bhvd_status auth_receive_proof(const struct auth *auth, const uint8_t peer_proof[AUTH_PROOF_SIZE],
                               struct bhvd_error *error);
