#include "transport/bell.h"

#include <unistd.h>

void bell_ring(struct bell *bell, int lazy)
{
    uint32_t state = atomic_load(&bell->word->state);
    if (state == BELL_AWAKE || (lazy && state == BELL_IDLE))
        return;
    // Only the ringer that takes the word back to awake pays for the system call.
    if (atomic_exchange(&bell->word->state, BELL_AWAKE) != BELL_AWAKE) {
        uint64_t one = 1;
        ssize_t written = write(bell->fd, &one, sizeof one);
        (void)written;          // full means that it is ringing already
    }
}

void bell_drain(struct bell *bell)
{
    uint64_t count;
    ssize_t got = read(bell->fd, &count, sizeof count);
    (void)got;
}
