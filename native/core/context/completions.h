// A list of numbers, into which each operation puts its own when it ends. One thread waits for many operations by it.
#pragma once

#include <stdatomic.h>

#include "bagua_hvd.h"

struct completion;

// Keeps the number in the operation's slot. BHVD_ERR_ARGUMENT: one is there; BHVD_ERR_SYSTEM.
bhvd_status completions_add(struct completion *_Atomic *slot, bhvd_completions *list, int64_t number);
// To be called when the operation's state says that it ended: puts the slot's number into its list, if it has one. Thread-safe.
void completions_ended(struct completion *_Atomic *slot);
