// The messages between client (rendezvous_client.c) and server (rendezvous_server.c), and the text that both show to people.
//
//     both ways          the handshake (auth.h)
//     client to server   magic, rank, size, respond_within_ms, limit_ms, scope_size, blob_size (u32 each), scope, blob
//     server to client   magic, status, body_size (u32 each), body
//                        BHVD_OK: for each rank its blob_size (u32) and blob; else the error message
#pragma once

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#include "base/bytes.h"
#include "transport/rendezvous.h"

enum {
    REQUEST_MAGIC = 0x71525642, REPLY_MAGIC = 0x70525642,       // "BVRq", "BVRp"
    REQUEST_HEAD_SIZE = 7 * 4, REPLY_HEAD_SIZE = 3 * 4,
    REQUEST_BODY_MAX = RENDEZVOUS_SCOPE_MAX + RENDEZVOUS_BLOB_MAX,
};

struct rendezvous_request {
    uint32_t rank, size;
    uint32_t respond_within_ms; // the server responds within this time even if ranks are missing; UINT32_MAX: never
    uint32_t limit_ms;          // the timeout that the client's user set, for the message
    uint32_t scope_size, blob_size;
};

static inline void rendezvous_request_put(struct bytes *b, const struct rendezvous_request *r)
{
    const uint32_t words[] = {REQUEST_MAGIC, r->rank,       r->size,     r->respond_within_ms,
                              r->limit_ms,   r->scope_size, r->blob_size};
    for (size_t i = 0; i < sizeof words / sizeof words[0]; i++)
        bytes_put_u32(b, words[i]);
}

// False unless every length is within its bounds; rank may still exceed size.
static inline bool rendezvous_request_take(struct bytes_reader *reader, struct rendezvous_request *r)
{
    uint32_t magic = bytes_take_u32(reader);
    r->rank = bytes_take_u32(reader);
    r->size = bytes_take_u32(reader);
    r->respond_within_ms = bytes_take_u32(reader);
    r->limit_ms = bytes_take_u32(reader);
    r->scope_size = bytes_take_u32(reader);
    r->blob_size = bytes_take_u32(reader);
    return !reader->failed && magic == REQUEST_MAGIC && r->size >= 1 && r->size <= RENDEZVOUS_SIZE_MAX
           && r->scope_size >= 1 && r->scope_size <= RENDEZVOUS_SCOPE_MAX && r->blob_size <= RENDEZVOUS_BLOB_MAX;
}

struct rendezvous_duration { char text[24]; };

// 30 s, 1.5 s, 0.25 s.
static inline struct rendezvous_duration rendezvous_duration(int64_t ms)
{
    struct rendezvous_duration d;
    snprintf(d.text, sizeof d.text, ms < 10000 ? "%.2g s" : "%.0f s", (double)ms / 1000);
    return d;
}
