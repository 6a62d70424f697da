// Time: one clock (monotonic) for every wait, deadlines as absolute nanoseconds.
#pragma once

#include <stdint.h>
#include <time.h>

#define CLOCK_NEVER INT64_MAX

static inline int64_t clock_now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static inline int64_t clock_ms_ns(int64_t ms) { return ms * 1000000; }

// CPU time of this thread.
static inline int64_t clock_thread_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

// Negative timeouts never expire.
static inline int64_t clock_deadline_ns(int timeout_ms)
{
    return timeout_ms < 0 ? CLOCK_NEVER : clock_now_ns() + clock_ms_ns(timeout_ms);
}

// For poll(): -1 for never, 0 if past, else rounded up so that a wait never spins.
static inline int clock_remaining_ms(int64_t deadline_ns)
{
    if (deadline_ns == CLOCK_NEVER)
        return -1;
    int64_t left = deadline_ns - clock_now_ns();
    if (left <= 0)
        return 0;
    left = (left + 999999) / 1000000;
    return left > 1000000000 ? 1000000000 : (int)left;
}
