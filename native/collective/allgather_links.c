// Allgather over links: every member sends its part to each other. Wire: each part n-1 times, one hop.
#include "collective/collective.h"
#include "collective/schedules.h"

void schedule_allgather(struct schedule *schedule, const size_t *part)
{
    const size_t mine = part[schedule->rank];
    struct part cut;
    size_t place = 0;
    for (int i = 0; i < schedule->size; place += part[i++]) {
        if (i == schedule->rank) {
            schedule_copy(schedule, in_space(IN_OUTPUT, place), in_space(IN_INPUT, 0), mine, STEP_NONE);
            continue;
        }
        for (size_t s = 0; (cut = part_segment((struct part){place, part[i]}, s)).nbytes; s++)
            schedule_receive(schedule, i, in_space(IN_OUTPUT, cut.begin), cut.nbytes, STEP_NONE);
    }
    // Everyone begins with another one.
    for (size_t s = 0; (cut = part_segment((struct part){0, mine}, s)).nbytes; s++)
        for (int i = 1; i < schedule->size; i++)
            schedule_send(schedule, (schedule->rank + i) % schedule->size, in_space(IN_INPUT, cut.begin), cut.nbytes, STEP_NONE);
}

bhvd_status allgather_links(struct run *run, struct group *group, const void *src, void *dst, const size_t *part)
{
    struct schedule schedule;
    schedule_init(&schedule, group->size, group->rank);
    schedule_allgather(&schedule, part);
    return flight_run(run, group, &schedule, &(struct material){.input = src, .output = dst});
}
