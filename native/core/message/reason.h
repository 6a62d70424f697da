// Why an operation failed, or a rank leaves, as ranks tell each other: behind the status (u8)
//
//     cause (u8), rank (u32; 2^32 - 1: none), size of the sentence (u16), the sentence
#pragma once

#include "bagua_hvd.h"
#include "base/bytes.h"

// Writes what follows the status.
void reason_put(struct bytes *out, const struct bhvd_error *error);
// Reads it. False: malformed, or no error, or one that blames no rank of the job's `size`.
bool reason_take(struct bytes_reader *r, uint8_t status, int size, struct bhvd_error *error);
// What is said of a rank that left.
void reason_left(struct bhvd_error *error, int rank);
