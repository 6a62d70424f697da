#include "run/levels.h"

#include <stdlib.h>

enum { LOCAL_BYTES = 256 << 10 };       // that are worked on within the host before links are looked at again

struct crossing {
    struct plan plan;
    struct flight *flight;              // NULL: none, or over
};

static struct crossing *crossing_of(const struct levels *l, size_t piece) { return &l->crossings[piece % l->depth]; }

static void start_crossing(struct run *run, struct levels *l)
{
    struct crossing *crossing = crossing_of(l, l->begun);
    struct plan *plan = &crossing->plan;
    const bhvd_status status = l->form->cross(run, l, l->begun++, plan);
    if (status || !plan->made)
        return;
    plan->material.execution = l->task.execution;
    flight_start(run, plan->group, &plan->schedule, &plan->material, NULL, NULL, &crossing->flight);
}

// It is over, or the run has failed.
static void end_crossing(struct run *run, struct crossing *crossing)
{
    if (crossing->flight)
        flight_drop(run, crossing->flight);
    crossing->flight = NULL;
    plan_fini(run, &crossing->plan);
}

static bool begins_next(const struct levels *l) { return l->begun < l->count && l->begun < l->ended + l->depth; }

static bool has_crossed(const struct levels *l)
{
    const struct flight *flight = l->ended < l->begun ? crossing_of(l, l->ended)->flight : NULL;
    return l->ended < l->begun && (!flight || flight_is_over(flight));
}

// Passages of one lane follow each other: an earlier execution's come first. They take it in this order, since they are looked at
// in it whenever a lane has become free.
static bool may_take_lane(const struct levels *l) { return !l->local->users[l->lane] || l->local->users[l->lane] == l; }

static void leave_lane(struct levels *l)
{
    if (l->local->users[l->lane] == l)
        l->local->users[l->lane] = NULL;
}

static void end_piece(struct run *run, struct levels *l)
{
    if (l->form->end)
        l->form->end(run, l, l->ended);
    l->ended++;
}

static void end_passage(struct run *run, struct levels *l)
{
    passage_end(run, l->passage);
    l->passage = NULL;
    if (l->is_reducing)
        start_crossing(run, l);
    else
        end_piece(run, l);
}

// Is there something to do that is not a passage's step?
static bool may_go_on(const struct levels *l)
{
    if (begins_next(l))
        return !l->form->reduce || may_take_lane(l);
    return has_crossed(l) && (!l->form->spread || may_take_lane(l));
}

static void go_on(struct run *run, struct levels *l)
{
    l->is_reducing = begins_next(l);
    if (l->is_reducing) {
        if (l->form->reduce)
            l->passage = l->form->reduce(run, l, l->begun);
        else
            start_crossing(run, l);
        return;
    }
    end_crossing(run, crossing_of(l, l->ended));
    if (l->form->spread)
        l->passage = l->form->spread(run, l, l->ended);
    else
        end_piece(run, l);
}

static bool advance(struct run *run, struct task *task)
{
    struct levels *l = (struct levels *)task;
    const size_t step = l->nbytes < HOST_SLAB_BYTES ? l->nbytes : HOST_SLAB_BYTES;
    bool progress = false;
    task->awaited = -1;
    if (may_take_lane(l))
        l->local->users[l->lane] = l;
    for (size_t nbytes = 0; l->ended < l->count && nbytes < LOCAL_BYTES && !run->failure.status; progress = true) {
        if (!l->passage) {
            if (!may_go_on(l))
                break;
            go_on(run, l);
        } else if (passage_is_over(l->passage)) {
            end_passage(run, l);
        } else if (passage_advance(run, l->passage)) {
            nbytes += step;
        } else {
            task->awaited = l->local->ranks[l->passage->slowest];
            passage_can_advance(run, l->passage);       // has who is waited for left?
            break;
        }
        run->messages_moved++;
    }
    task->is_over = l->ended == l->count && !run->failure.status;
    if (task->is_over)
        leave_lane(l);
    return progress;
}

static bool can_advance(struct run *run, struct task *task)
{
    struct levels *l = (struct levels *)task;
    if (l->passage)
        return passage_is_over(l->passage) || passage_can_advance(run, l->passage);
    return task->is_over || may_go_on(l);
}

static void destroy(struct run *run, struct task *task)
{
    struct levels *l = (struct levels *)task;
    leave_lane(l);
    for (size_t i = 0; i < l->depth; i++)
        end_crossing(run, &l->crossings[i]);
    if (l->form->destroy)
        l->form->destroy(run, l);
    free(l->crossings);
    free(l);
}

void *levels_create(struct run *run, size_t size, const struct levels_form *form, struct group *local, size_t nbytes, size_t count,
                    size_t most)
{
    const size_t depth = count < most ? count : most;
    struct levels *l = calloc(1, size);
    struct crossing *crossings = calloc(depth + 1, sizeof *crossings);
    if (!l || !crossings) {
        free(l);
        free(crossings);
        run_fail(run, BHVD_ERR_SYSTEM, "no memory for an operation of %zu bytes", nbytes);
        return NULL;
    }
    *l = (struct levels){
        .task = {.advance = advance, .can_advance = can_advance, .destroy = destroy},
        .form = form, .local = local, .lane = 1 + (int)(run->connections.started % (HOST_LANES - 1)),
        .nbytes = nbytes, .count = count, .depth = depth, .crossings = crossings,
    };
    return l;
}

bhvd_status levels_plan(struct run *run, struct levels *l, bool is_complete, struct plan *plan)
{
    if (!is_complete) {
        const size_t nbytes = l->nbytes;
        destroy(run, &l->task);
        return run_fail(run, BHVD_ERR_SYSTEM, "no memory for the pieces of %zu bytes", nbytes);
    }
    plan->made = true;
    plan->task = &l->task;
    return BHVD_OK;
}
