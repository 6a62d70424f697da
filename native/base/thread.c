#include "base/thread.h"

#include <limits.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/clock.h"

void futex_wait(_Atomic uint32_t *word, uint32_t expected, int64_t deadline_ns)
{
    struct timespec left, *timeout = NULL;
    if (deadline_ns != CLOCK_NEVER) {
        int64_t ns = deadline_ns - clock_now_ns();
        if (ns <= 0)
            return;
        left = (struct timespec){.tv_sec = ns / 1000000000, .tv_nsec = ns % 1000000000};
        timeout = &left;
    }
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, expected, timeout, NULL, 0);
}

void futex_wake_all(_Atomic uint32_t *word) { syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0); }
