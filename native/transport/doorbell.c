#include "transport/doorbell.h"

#include <poll.h>
#include <sys/eventfd.h>

void doorbell_ring(struct doorbell *doorbell, int no_wakeup)
{
    uint32_t state = atomic_load(&doorbell->word->state);
    if (state == DOORBELL_AWAKE || (no_wakeup && state == DOORBELL_IDLE))
        return;
    // Only the ringer that resets the word to awake makes the system call.
    if (atomic_exchange(&doorbell->word->state, DOORBELL_AWAKE) != DOORBELL_AWAKE)
        eventfd_write(doorbell->fd, 1);         // full: already ringing
}

void doorbell_drain(struct doorbell *doorbell)
{
    eventfd_read(doorbell->fd, &(eventfd_t){0});
}

bool doorbell_is_rung(const struct doorbell *doorbell)
{
    struct pollfd fd = {.fd = doorbell->fd, .events = POLLIN};
    return poll(&fd, 1, 0) > 0;
}
