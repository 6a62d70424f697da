// A list of numbers, to which each operation adds its own when it ends, so that one thread can wait for many operations.
#pragma once

#include <stdatomic.h>

#include "bagua_hvd.h"

struct completion;

// Stores the number in the operation's slot. BHVD_ERR_ARGUMENT: the slot is taken; BHVD_ERR_SYSTEM.
bhvd_status completions_add(struct completion *_Atomic *slot, bhvd_completions *list, int64_t number);
// Call after the operation's state is set to complete: puts the slot's number into its list, if it has one. Thread-safe.
void completions_signal(struct completion *_Atomic *slot);
