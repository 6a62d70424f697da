#include "base/hmac.h"

#include <string.h>

enum { BLOCK_SIZE = 64 };

struct sha256_state {
    uint32_t h[8];
    uint64_t size;                      // bytes hashed so far
    uint8_t block[BLOCK_SIZE];          // the first size % BLOCK_SIZE bytes are not yet in h
};

// FIPS 180-4, 4.2.2: fractional parts of the cube roots of the first 64 primes.
static const uint32_t K[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2,
};

static uint32_t rotate_right(uint32_t x, int n) { return x >> n | x << (32 - n); }

static uint32_t load_big_endian(const uint8_t *p)
{
    return (uint32_t)p[0] << 24 | (uint32_t)p[1] << 16 | (uint32_t)p[2] << 8 | p[3];
}

static void store_big_endian(uint8_t *p, uint32_t v)
{
    for (int i = 0; i < 4; i++)
        p[i] = (uint8_t)(v >> (24 - 8 * i));
}

// FIPS 180-4, 6.2.2, with its names.
static void compress(uint32_t h[8], const uint8_t block[BLOCK_SIZE])
{
    uint32_t w[64];
    for (int t = 0; t < 16; t++)
        w[t] = load_big_endian(block + 4 * t);
    for (int t = 16; t < 64; t++) {
        uint32_t s0 = rotate_right(w[t - 15], 7) ^ rotate_right(w[t - 15], 18) ^ w[t - 15] >> 3;
        uint32_t s1 = rotate_right(w[t - 2], 17) ^ rotate_right(w[t - 2], 19) ^ w[t - 2] >> 10;
        w[t] = s1 + w[t - 7] + s0 + w[t - 16];
    }
    uint32_t v[8];                      // a, b, ... h of the standard
    memcpy(v, h, sizeof v);
    for (int t = 0; t < 64; t++) {
        uint32_t a = v[0], e = v[4];
        uint32_t sum1 = rotate_right(e, 6) ^ rotate_right(e, 11) ^ rotate_right(e, 25);
        uint32_t ch = (e & v[5]) ^ (~e & v[6]);
        uint32_t t1 = v[7] + sum1 + ch + K[t] + w[t];
        uint32_t sum0 = rotate_right(a, 2) ^ rotate_right(a, 13) ^ rotate_right(a, 22);
        uint32_t maj = (a & v[1]) ^ (a & v[2]) ^ (v[1] & v[2]);
        memmove(v + 1, v, 7 * sizeof v[0]);
        v[4] += t1;
        v[0] = t1 + sum0 + maj;
    }
    for (int i = 0; i < 8; i++)
        h[i] += v[i];
}

static void sha256_init(struct sha256_state *s)
{
    // 5.3.3: fractional parts of the square roots of the first eight primes.
    *s = (struct sha256_state){.h = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c,
                                     0x1f83d9ab, 0x5be0cd19}};
}

static void sha256_update(struct sha256_state *s, const void *data, size_t size)
{
    const uint8_t *p = data;
    while (size > 0) {
        size_t at = s->size % BLOCK_SIZE, n = BLOCK_SIZE - at < size ? BLOCK_SIZE - at : size;
        memcpy(s->block + at, p, n);
        s->size += n;
        p += n;
        size -= n;
        if (at + n == BLOCK_SIZE)
            compress(s->h, s->block);
    }
}

// 5.1.1: a one bit, zeros, and the length in bits in the last eight bytes of a block.
static void sha256_finish(struct sha256_state *s, uint8_t digest[SHA256_SIZE])
{
    uint64_t bits = s->size * 8;
    size_t at = s->size % BLOCK_SIZE;
    size_t length_at = (at < BLOCK_SIZE - 8 ? BLOCK_SIZE : 2 * BLOCK_SIZE) - 8 - at;
    uint8_t padding[BLOCK_SIZE + 8] = {0x80};
    store_big_endian(padding + length_at, (uint32_t)(bits >> 32));
    store_big_endian(padding + length_at + 4, (uint32_t)bits);
    sha256_update(s, padding, length_at + 8);
    for (int i = 0; i < 8; i++)
        store_big_endian(digest + 4 * i, s->h[i]);
}

void sha256(uint8_t digest[SHA256_SIZE], const void *data, size_t size)
{
    struct sha256_state s;
    sha256_init(&s);
    sha256_update(&s, data, size);
    sha256_finish(&s, digest);
}

// H((key ^ opad) || H((key ^ ipad) || data)), the key padded with zeros to a block, or hashed first when longer.
void hmac_sha256(uint8_t digest[SHA256_SIZE], const void *key, size_t key_size, const void *data, size_t size)
{
    uint8_t inner_key[BLOCK_SIZE] = {0}, outer_key[BLOCK_SIZE];
    if (key_size > BLOCK_SIZE)
        sha256(inner_key, key, key_size);
    else if (key_size > 0)
        memcpy(inner_key, key, key_size);
    for (int i = 0; i < BLOCK_SIZE; i++) {
        outer_key[i] = inner_key[i] ^ 0x5c;
        inner_key[i] ^= 0x36;
    }
    struct sha256_state s;
    sha256_init(&s);
    sha256_update(&s, inner_key, sizeof inner_key);
    sha256_update(&s, data, size);
    sha256_finish(&s, digest);
    sha256_init(&s);
    sha256_update(&s, outer_key, sizeof outer_key);
    sha256_update(&s, digest, SHA256_SIZE);
    sha256_finish(&s, digest);
}
