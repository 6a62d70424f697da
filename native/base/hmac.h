// SHA-256 (FIPS 180-4) and HMAC (RFC 2104), only for the handshake in transport/auth.c.
#pragma once

#include <stddef.h>
#include <stdint.h>

enum { SHA256_SIZE = 32 };

void sha256(uint8_t digest[SHA256_SIZE], const void *data, size_t size);
void hmac_sha256(uint8_t digest[SHA256_SIZE], const void *key, size_t key_size, const void *data, size_t size);
