// Mutual proof that both ends of a connected stream socket know the job's secret, before a byte of it is parsed.
//
// Each side sends a hello (magic, version, a 32-byte random nonce), then the proof HMAC-SHA256(secret, role || own
// nonce || peer's nonce), and verifies the other's in constant time. The role byte differs between the side that
// connected and the one that accepted, so that a reflected message proves nothing; the nonces are fresh, so that a
// replayed one proves nothing either. The secret itself never travels. What follows is not encrypted
// (docs/security.md).
//
// A side sends its proof before it has verified the other's, so both learn that their secrets differ.
#ifndef BHVD_AUTH_H
#define BHVD_AUTH_H

#include <stddef.h>
#include <stdint.h>

#include "bagua_hvd.h"
#include "base/hmac.h"

enum auth_role { AUTH_CONNECTED = 'c', AUTH_ACCEPTED = 'a' };

// Blocks until both sides are convinced, at most until deadline_ns (base/clock.h). fd may be blocking or not, and keeps
// its mode. On any error the caller closes fd.
// BHVD_ERR_AUTH: the other side has another secret. BHVD_ERR_TIMEOUT. BHVD_ERR_PEER_LOST: it hung up or sent garbage.
// BHVD_ERR_SYSTEM: the machine gave no random bytes.
bhvd_status auth_handshake(int fd, enum auth_role role, const void *secret, size_t secret_size, int64_t deadline_ns,
                           struct bhvd_error *error);

// The same handshake without its waits, for a server that must not block on one peer (rendezvous.c). In this order:
// begin, send hello; receive the peer's hello, send proof; receive the peer's proof.
enum { AUTH_NONCE_SIZE = 32, AUTH_HELLO_SIZE = 8 + AUTH_NONCE_SIZE, AUTH_PROOF_SIZE = SHA256_SIZE };

struct auth {
    enum auth_role role;
    uint8_t hello[AUTH_HELLO_SIZE];         // to send, after auth_begin
    uint8_t proof[AUTH_PROOF_SIZE];         // to send, after auth_receive_hello
    uint8_t expected[AUTH_PROOF_SIZE];      // what only a peer that knows the secret can send
};

// BHVD_ERR_SYSTEM.
bhvd_status auth_begin(struct auth *auth, enum auth_role role, struct bhvd_error *error);
// BHVD_ERR_PEER_LOST: not a hello of this version.
bhvd_status auth_receive_hello(struct auth *auth, const uint8_t peer_hello[AUTH_HELLO_SIZE], const void *secret,
                               size_t secret_size, struct bhvd_error *error);
// BHVD_ERR_AUTH.
bhvd_status auth_receive_proof(const struct auth *auth, const uint8_t peer_proof[AUTH_PROOF_SIZE],
                               struct bhvd_error *error);

#endif
