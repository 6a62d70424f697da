#include "transport/doorbell.h"

#include <poll.h>
#include <unistd.h>

void doorbell_ring(struct doorbell *doorbell, int lazy)
{
    uint32_t state = atomic_load(&doorbell->word->state);
    if (state == DOORBELL_AWAKE || (lazy && state == DOORBELL_IDLE))
        return;
    // Only the ringer that resets the word to awake makes the system call.
    if (atomic_exchange(&doorbell->word->state, DOORBELL_AWAKE) != DOORBELL_AWAKE) {
        uint64_t one = 1;
        ssize_t written = write(doorbell->fd, &one, sizeof one);
        (void)written;          // full: already ringing
    }
}

void doorbell_drain(struct doorbell *doorbell)
{
    uint64_t count;
    ssize_t got = read(doorbell->fd, &count, sizeof count);
    (void)got;
}

bool doorbell_is_rung(const struct doorbell *doorbell)
{
    struct pollfd fd = {.fd = doorbell->fd, .events = POLLIN};
    return poll(&fd, 1, 0) > 0;
}
