// The reason why an operation failed or a rank leaves, in wire format: after the status (u8)
//
//     cause (u8), rank (u32; 2^32 - 1: none), size of the message (u16), the message
#pragma once

#include "bagua_hvd.h"
#include "base/bytes.h"

// Writes the part after the status.
void reason_put(struct bytes *out, const struct bhvd_error *error);
// Reads it. False: malformed, not an error, or it blames a rank outside the job's `size`.
bool reason_take(struct bytes_reader *r, uint8_t status, int size, struct bhvd_error *error);
// The error for a rank that left.
void reason_departed(struct bhvd_error *error, int rank);
