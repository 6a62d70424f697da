// A list of numbers, into which each operation puts its own when it ends. One thread waits for many operations by it.
#pragma once

#include <stdatomic.h>
#include <stdbool.h>

#include "bagua_hvd.h"

struct completion;

// Keeps the number in the operation's slot. False: *status says why, BHVD_ERR_ARGUMENT when one is there.
bool completions_add(struct completion *_Atomic *slot, bhvd_completions *list, int64_t number, bhvd_status *status);
// To be called when the operation's state says that it ended: puts the slot's number into its list, if it has one. Thread-safe.
void completions_ended(struct completion *_Atomic *slot);
