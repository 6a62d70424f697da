#include "executor/schedule.h"

#include "base/array.h"

void schedule_init(struct schedule *schedule, int size, int rank)
{
    *schedule = (struct schedule){.size = size, .rank = rank};
}

void schedule_fini(struct schedule *schedule)
{
    free(schedule->steps);
    *schedule = (struct schedule){0};
}

static void reach(struct schedule *schedule, struct place place, size_t nbytes)
{
    if (schedule->space_nbytes[place.space] < place.at + nbytes)
        schedule->space_nbytes[place.space] = place.at + nbytes;
}

static int append(struct schedule *schedule, struct step step)
{
    if (!array_reserve(schedule->steps, schedule->count, schedule->capacity, 32)) {
        schedule->failed = true;
        return STEP_NONE;
    }
    reach(schedule, step.to, step.nbytes);
    reach(schedule, step.from, step.nbytes);
    reach(schedule, step.other, step.nbytes);
    schedule->steps[schedule->count] = step;
    return schedule->count++;
}

// Unused places are set to a used one.
static int put(struct schedule *schedule, enum step_kind kind, int peer, struct place to, struct place from, struct place other,
               size_t nbytes, int after)
{
    return append(schedule, (struct step){.kind = kind, .peer = peer, .after = {after, STEP_NONE}, .to = to, .from = from,
                                          .other = other, .nbytes = nbytes});
}

int schedule_send(struct schedule *schedule, int peer, struct place from, size_t nbytes, int after)
{
    return put(schedule, STEP_SEND, peer, from, from, from, nbytes, after);
}

int schedule_receive(struct schedule *schedule, int peer, struct place to, size_t nbytes, int after)
{
    return put(schedule, STEP_RECEIVE, peer, to, to, to, nbytes, after);
}

int schedule_load(struct schedule *schedule, struct part part, int after)
{
    const struct place place = in_space(IN_VECTOR, part.begin);
    return put(schedule, STEP_LOAD, 0, place, place, place, part.nbytes, after);
}

int schedule_reduce(struct schedule *schedule, struct place to, struct place from, struct place other, size_t nbytes, int after)
{
    return put(schedule, STEP_REDUCE, 0, to, from, other, nbytes, after);
}

int schedule_scale(struct schedule *schedule, struct place to, size_t nbytes, int after)
{
    return put(schedule, STEP_SCALE, 0, to, to, to, nbytes, after);
}

int schedule_store(struct schedule *schedule, struct part part, int after)
{
    const struct place place = in_space(IN_VECTOR, part.begin);
    return put(schedule, STEP_STORE, 0, place, place, place, part.nbytes, after);
}

int schedule_copy(struct schedule *schedule, struct place to, struct place from, size_t nbytes, int after)
{
    return put(schedule, STEP_COPY, 0, to, from, from, nbytes, after);
}

static int put_coded(struct schedule *schedule, enum step_kind kind, struct place to, struct place from, struct place own,
                     size_t nbytes, struct part values, int after)
{
    return append(schedule, (struct step){.kind = kind, .after = {after, STEP_NONE}, .to = to, .from = from, .other = own,
                                          .nbytes = nbytes, .values = values});
}

int schedule_encode(struct schedule *schedule, struct place code, size_t nbytes, struct part values, int after)
{
    return put_coded(schedule, STEP_ENCODE, code, code, code, nbytes, values, after);
}

int schedule_recode(struct schedule *schedule, struct place code, size_t nbytes, struct place from, struct place own,
                    struct part values, int after)
{
    return put_coded(schedule, STEP_RECODE, code, from, own, nbytes, values, after);
}

int schedule_decode(struct schedule *schedule, struct place code, size_t nbytes, struct part values, int after)
{
    return put_coded(schedule, STEP_DECODE, code, code, code, nbytes, values, after);
}

int schedule_combine(struct schedule *schedule, struct place from, struct place own, size_t nbytes, struct part values, int after)
{
    return put_coded(schedule, STEP_COMBINE, own, from, own, nbytes, values, after);
}

int schedule_both(struct schedule *schedule, int one, int other)
{
    if (one == STEP_NONE || other == STEP_NONE)
        return one == STEP_NONE ? other : one;
    return append(schedule, (struct step){.kind = STEP_NOTHING, .after = {one, other}});
}
