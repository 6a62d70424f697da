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

static void reach(struct schedule *schedule, struct location location, size_t nbytes)
{
    if (schedule->buffer_nbytes[location.buffer] < location.offset + nbytes)
        schedule->buffer_nbytes[location.buffer] = location.offset + nbytes;
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

// Unused locations are set to a used one.
static int put(struct schedule *schedule, enum step_kind kind, int peer, struct location to, struct location from,
               struct location other, size_t nbytes, int after)
{
    return append(schedule, (struct step){.kind = kind, .peer = peer, .after = {after, STEP_NONE}, .to = to, .from = from,
                                          .other = other, .nbytes = nbytes});
}

int schedule_send(struct schedule *schedule, int peer, struct location from, size_t nbytes, int after)
{
    return put(schedule, STEP_SEND, peer, from, from, from, nbytes, after);
}

int schedule_receive(struct schedule *schedule, int peer, struct location to, size_t nbytes, int after)
{
    return put(schedule, STEP_RECEIVE, peer, to, to, to, nbytes, after);
}

int schedule_load(struct schedule *schedule, struct byte_range range, int after)
{
    const struct location location = in_buffer(FUSION_BUFFER, range.begin);
    return put(schedule, STEP_LOAD, 0, location, location, location, range.nbytes, after);
}

int schedule_reduce(struct schedule *schedule, struct location to, struct location from, struct location other, size_t nbytes,
                    int after)
{
    return put(schedule, STEP_REDUCE, 0, to, from, other, nbytes, after);
}

int schedule_scale(struct schedule *schedule, struct location to, size_t nbytes, int after)
{
    return put(schedule, STEP_SCALE, 0, to, to, to, nbytes, after);
}

int schedule_store(struct schedule *schedule, struct byte_range range, int after)
{
    const struct location location = in_buffer(FUSION_BUFFER, range.begin);
    return put(schedule, STEP_STORE, 0, location, location, location, range.nbytes, after);
}

int schedule_copy(struct schedule *schedule, struct location to, struct location from, size_t nbytes, int after)
{
    return put(schedule, STEP_COPY, 0, to, from, from, nbytes, after);
}

static int put_coded(struct schedule *schedule, enum step_kind kind, struct location to, struct location from, struct location own,
                     size_t nbytes, struct byte_range values, int after)
{
    return append(schedule, (struct step){.kind = kind, .after = {after, STEP_NONE}, .to = to, .from = from, .other = own,
                                          .nbytes = nbytes, .values = values});
}

int schedule_encode(struct schedule *schedule, struct location code, size_t nbytes, struct byte_range values, int after)
{
    return put_coded(schedule, STEP_ENCODE, code, code, code, nbytes, values, after);
}

int schedule_reencode(struct schedule *schedule, struct location code, size_t nbytes, struct location from, struct location own,
                      struct byte_range values, int after)
{
    return put_coded(schedule, STEP_REENCODE, code, from, own, nbytes, values, after);
}

int schedule_decode(struct schedule *schedule, struct location code, size_t nbytes, struct byte_range values, int after)
{
    return put_coded(schedule, STEP_DECODE, code, code, code, nbytes, values, after);
}

int schedule_combine(struct schedule *schedule, struct location from, struct location own, size_t nbytes,
                     struct byte_range values, int after)
{
    return put_coded(schedule, STEP_COMBINE, own, from, own, nbytes, values, after);
}

int schedule_both(struct schedule *schedule, int one, int other)
{
    if (one == STEP_NONE || other == STEP_NONE)
        return one == STEP_NONE ? other : one;
    return append(schedule, (struct step){.kind = STEP_NOOP, .after = {one, other}});
}
