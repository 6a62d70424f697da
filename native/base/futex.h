// Sleeping on a 32-bit word of this process (Linux futex).
#pragma once

#include <stdatomic.h>
#include <stdint.h>

// Sleeps while *word == expected, at most until deadline_ns (base/clock.h). May return early: check the word again.
void futex_wait(_Atomic uint32_t *word, uint32_t expected, int64_t deadline_ns);
void futex_wake_all(_Atomic uint32_t *word);
