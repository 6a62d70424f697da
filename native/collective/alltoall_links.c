// Alltoall over links: every member sends each other member its part. Cost: the exchanged bytes, one latency.
#include "collective/schedules.h"

void schedule_alltoall(struct schedule *schedule, const size_t *sent, const size_t *received)
{
    const int n = schedule->size, me = schedule->rank;
    size_t from = 0, own_from = 0, to = 0;
    struct byte_range cut;
    for (int i = 0; i < n; from += sent[i++]) {
        if (i == me)
            own_from = from;
        for (size_t s = 0; i != me && (cut = byte_range_segment((struct byte_range){from, sent[i]}, s)).nbytes; s++)
            schedule_send(schedule, i, in_buffer(INPUT_BUFFER, cut.begin), cut.nbytes, STEP_NONE);
    }
    for (int i = 0; i < n; to += received[i++]) {
        if (i == me)
            schedule_copy(schedule, in_buffer(OUTPUT_BUFFER, to), in_buffer(INPUT_BUFFER, own_from), sent[me], STEP_NONE);
        for (size_t s = 0; i != me && (cut = byte_range_segment((struct byte_range){to, received[i]}, s)).nbytes; s++)
            schedule_receive(schedule, i, in_buffer(OUTPUT_BUFFER, cut.begin), cut.nbytes, STEP_NONE);
    }
}
