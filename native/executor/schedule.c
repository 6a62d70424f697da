#include "executor/schedule.h"

#include "base/containers.h"

void schedule_init(struct schedule *schedule, int size, int rank)
{
    *schedule = (struct schedule){.size = size, .rank = rank};
}

void schedule_fini(struct schedule *schedule)
{
    free(schedule->steps);
    *schedule = (struct schedule){0};
}

// Moves a location to its place if it is a part's.
static void place(struct schedule *schedule, struct location *location, size_t nbytes)
{
    if (schedule->part) {
        const struct location base = schedule->part->base[location->buffer];
        *location = in_buffer(base.buffer, base.offset + location->offset);
    }
    if (nbytes && schedule->buffer_nbytes[location->buffer] < location->offset + nbytes)
        schedule->buffer_nbytes[location->buffer] = location->offset + nbytes;
}

static int append(struct schedule *schedule, struct step step)
{
    const struct schedule_part *part = schedule->part;
    if (!array_reserve(schedule->steps, schedule->count, schedule->capacity, 32)) {
        schedule->failed = true;
        return STEP_NONE;
    }
    if (part) {
        step.number = part->number;
        step.after[0] = step.after[0] == STEP_NONE && step.after[1] == STEP_NONE ? part->after : step.after[0];
    }
    for (int w = 0; w < STEP_WAITS; w++)
        if (step.after[w] != STEP_NONE)
            schedule->steps[step.after[w]].is_awaited = true;
    place(schedule, &step.to, step.nbytes);
    place(schedule, &step.from, step.nbytes);
    place(schedule, &step.other, step.nbytes);
    schedule->steps[schedule->count] = step;
    return schedule->count++;
}

// Completes a step of this kind. Unused locations are set to a used one.
static int put(struct schedule *schedule, struct step step, struct location to, struct location from, struct location other,
               size_t nbytes, int after)
{
    step.to = to;
    step.from = from;
    step.other = other;
    step.nbytes = nbytes;
    step.after[0] = after;
    step.after[1] = STEP_NONE;
    return append(schedule, step);
}

int schedule_send(struct schedule *schedule, int peer, struct location from, size_t nbytes, int after)
{
    return put(schedule, (struct step){.kind = STEP_SEND, .peer = peer}, from, from, from, nbytes, after);
}

int schedule_receive(struct schedule *schedule, int peer, struct location to, size_t nbytes, int after)
{
    return put(schedule, (struct step){.kind = STEP_RECEIVE, .peer = peer}, to, to, to, nbytes, after);
}

int schedule_load(struct schedule *schedule, struct byte_range range, int after)
{
    const struct location location = in_buffer(FUSION_BUFFER, range.begin);
    if (schedule->part)
        return after;
    return put(schedule, (struct step){.kind = STEP_LOAD}, location, location, location, range.nbytes, after);
}

int schedule_reduce(struct schedule *schedule, struct location to, struct location from, struct location other, size_t nbytes,
                    int after)
{
    return put(schedule, (struct step){.kind = STEP_REDUCE}, to, from, other, nbytes, after);
}

int schedule_scale(struct schedule *schedule, struct location to, size_t nbytes, int after)
{
    return put(schedule, (struct step){.kind = STEP_SCALE}, to, to, to, nbytes, after);
}

int schedule_store(struct schedule *schedule, struct byte_range range, int after)
{
    const struct location location = in_buffer(FUSION_BUFFER, range.begin);
    if (schedule->part)
        return after;
    return put(schedule, (struct step){.kind = STEP_STORE}, location, location, location, range.nbytes, after);
}

int schedule_copy(struct schedule *schedule, struct location to, struct location from, size_t nbytes, int after)
{
    return put(schedule, (struct step){.kind = STEP_COPY}, to, from, from, nbytes, after);
}

int schedule_encode(struct schedule *schedule, struct location code, size_t nbytes, struct byte_range values, int after)
{
    return put(schedule, (struct step){.kind = STEP_ENCODE, .values = values}, code, code, code, nbytes, after);
}

int schedule_reencode(struct schedule *schedule, struct location code, size_t nbytes, struct location from, struct location own,
                      struct byte_range values, int after)
{
    return put(schedule, (struct step){.kind = STEP_REENCODE, .values = values}, code, from, own, nbytes, after);
}

int schedule_decode(struct schedule *schedule, struct location code, size_t nbytes, struct byte_range values, int after)
{
    return put(schedule, (struct step){.kind = STEP_DECODE, .values = values}, code, code, code, nbytes, after);
}

int schedule_combine(struct schedule *schedule, struct location from, struct location own, size_t nbytes,
                     struct byte_range values, int after)
{
    return put(schedule, (struct step){.kind = STEP_COMBINE, .values = values}, own, from, own, nbytes, after);
}

int schedule_reduce_within(struct schedule *schedule, int number, struct location to, size_t nbytes, struct byte_range values,
                           int after)
{
    return put(schedule, (struct step){.kind = STEP_REDUCE_WITHIN, .number = number, .values = values}, to, to, to, nbytes, after);
}

int schedule_distribute_within(struct schedule *schedule, int number, struct location from, size_t nbytes, struct byte_range values,
                               int after)
{
    return put(schedule, (struct step){.kind = STEP_DISTRIBUTE_WITHIN, .number = number, .values = values}, from, from, from,
               nbytes, after);
}

int schedule_both(struct schedule *schedule, int one, int other)
{
    if (one == STEP_NONE || other == STEP_NONE)
        return one == STEP_NONE ? other : one;
    return append(schedule, (struct step){.kind = STEP_NOOP, .after = {one, other}});
}

void schedule_begin_part(struct schedule *schedule, const struct schedule_part *part)
{
    schedule->part = part;
    schedule->part_begin = schedule->count;
}

int schedule_end_part(struct schedule *schedule)
{
    int all = schedule->count == schedule->part_begin ? schedule->part->after : STEP_NONE;
    schedule->part = NULL;
    for (int i = schedule->part_begin, end = schedule->count; i < end; i++)
        all = schedule->steps[i].is_awaited ? all : schedule_both(schedule, all, i);
    return all;
}

void schedule_pieces(struct schedule *schedule, size_t pieces, size_t in_flight, schedule_piece_fn begin, schedule_piece_fn end,
                     const void *arg)
{
    int after[SCHEDULE_PIECES_MAX];
    for (size_t i = 0; i < pieces + in_flight; i++) {
        int *at = &after[i % in_flight];
        if (i < in_flight)
            *at = STEP_NONE;
        else if (end && i - in_flight < pieces)
            *at = end(arg, schedule, i - in_flight, *at);
        if (i < pieces)
            *at = begin(arg, schedule, i, *at);
    }
}

size_t schedule_scratch_end(const struct schedule *schedule)
{
    return size_round_up(schedule->buffer_nbytes[SCRATCH_BUFFER], CACHE_LINE);
}
