// Mutual proof that both ends of a connected stream socket know the job's secret, before a byte of it is parsed.
//
// Each side sends a 32-byte random nonce, then HMAC-SHA256(secret, role || own nonce || peer's nonce), and verifies the
// other's in constant time. The role byte differs between the side that connected and the one that accepted, so that a
// reflected message proves nothing. The secret itself never travels. What follows is not encrypted (docs/security.md).
#ifndef BHVD_AUTH_H
#define BHVD_AUTH_H

#include <stddef.h>
#include <stdint.h>

#include "bagua_hvd.h"

enum auth_role { AUTH_CONNECTED = 'c', AUTH_ACCEPTED = 'a' };

// Blocks until both sides are convinced, at most until deadline_ns (base/clock.h). fd may be blocking or not, and keeps
// its mode. On any error the caller closes fd.
// BHVD_ERR_AUTH: the other side has another secret. BHVD_ERR_TIMEOUT. BHVD_ERR_PEER_LOST: it hung up or sent garbage.
bhvd_status auth_handshake(int fd, enum auth_role role, const void *secret, size_t secret_size, int64_t deadline_ns,
                           struct bhvd_error *error);

#endif
