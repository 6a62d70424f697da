#include "run/executor.h"

#include <stdlib.h>

#include "run/vector.h"

enum {
    URGENT_BYTES = 64 << 10,
    LOCAL_BYTES = 256 << 10     // that local steps work on before links are looked at again
};

// A step on its way.
struct flown {
    struct transfer transfer;
    uint32_t number;            // of the message
    int waits;                  // for so many others
    int next[STEP_WAITS];       // for each that it waits for: the next edge from there, counted as STEP_WAITS step + index
    int first;                  // edge to one that waits for this
};

struct flight {
    struct flight *next;
    struct run *run;
    const struct group *group;
    struct schedule schedule;
    struct material material;
    struct vector vector;
    unsigned char *spaces[SPACE_COUNT];
    struct fusion_buffer memory;            // of vector and scratch
    struct flown *steps;
    int *ready;                             // local steps that nothing is waited for, in order
    int ready_begin, ready_end;
    int left;                               // steps that are not done
    struct transfer_queue moved;            // transfers that are done
    uint64_t execution;                     // its number, or LINK_MEETING and an id
    bool is_urgent;                         // so little that it need not wait behind others' messages
    void (*ended)(void *arg, bhvd_status status);
    void *arg;
};

static unsigned char *at(const struct flight *flight, struct place place) { return place_among(flight->spaces, place); }

// ------------------------------------------------------------------------------------------------------------- memory

static size_t aligned(size_t size) { return (size + 63) / 64 * 64; }

// Lays the vector out, in the place of the result where there is only one, and the scratch.
static bool take_memory(struct flight *flight)
{
    const size_t *nbytes = flight->schedule.space_nbytes;
    const struct span_list *list = flight->material.list;
    const bool packed = list && (list->count != 1 || !list->spans[0].dst);
    const size_t vector = !list || packed ? aligned(nbytes[IN_VECTOR]) : 0, total = vector + aligned(nbytes[IN_SCRATCH]);
    if (total && !fusion_borrow(&flight->run->fusion, total, &flight->memory))
        return false;
    flight->spaces[IN_INPUT] = (unsigned char *)flight->material.input;
    flight->spaces[IN_OUTPUT] = flight->material.output;
    flight->spaces[IN_VECTOR] = list && !packed ? list->spans[0].dst : flight->memory.data;
    flight->spaces[IN_SCRATCH] = (unsigned char *)flight->memory.data + vector;
    flight->vector = (struct vector){flight->spaces[IN_VECTOR], list, bhvd_dtype_size(flight->material.reduction.dtype), packed};
    return true;
}

static void end_meeting(const struct flight *flight)
{
    for (int i = 0; i < flight->schedule.count; i++) {
        const struct step *step = &flight->schedule.steps[i];
        if (step->kind == STEP_SEND || step->kind == STEP_RECEIVE)
            link_end_meeting(group_link(flight->run, flight->group, step->peer), flight->execution);
    }
}

static void flight_free(struct flight *flight)
{
    fusion_return(&flight->run->fusion, &flight->memory);
    schedule_fini(&flight->schedule);
    free(flight->steps);
    free(flight->ready);
    free(flight);
}

static void unlink_flight(struct executor *executor, const struct flight *flight)
{
    for (struct flight **f = &executor->head; *f; f = &(*f)->next) {
        if (*f == flight) {
            *f = flight->next;
            if (!flight->next)
                executor->tail = f;
            return;
        }
    }
}

// -------------------------------------------------------------------------------------------------------------- steps

static void post(struct flight *flight, int index)
{
    const struct step *step = &flight->schedule.steps[index];
    struct flown *flown = &flight->steps[index];
    struct link *link = group_link(flight->run, flight->group, step->peer);
    if (step->kind == STEP_SEND)
        link_send_numbered(link, flight->execution, flown->number, &flown->transfer, at(flight, step->from), step->nbytes,
                           &flight->moved, flight->is_urgent);
    else
        link_recv_numbered(link, flight->execution, flown->number, &flown->transfer, at(flight, step->to), step->nbytes,
                           &flight->moved);
}

// Nothing is waited for any more.
static void begin(struct flight *flight, int index)
{
    const enum step_kind kind = flight->schedule.steps[index].kind;
    if (kind == STEP_SEND || kind == STEP_RECEIVE)
        post(flight, index);
    else
        flight->ready[flight->ready_end++] = index;
}

static void end(struct flight *flight, int index)
{
    flight->left--;
    for (int edge = flight->steps[index].first; edge != STEP_NONE;) {
        const int waiting = edge / STEP_WAITS;
        edge = flight->steps[waiting].next[edge % STEP_WAITS];
        if (--flight->steps[waiting].waits == 0)
            begin(flight, waiting);
    }
}

static void act(const struct flight *flight, const struct step *step)
{
    const struct reduction *reduction = &flight->material.reduction;
    const size_t count = flight->vector.element ? step->nbytes / flight->vector.element : 0;
    switch (step->kind) {
    case STEP_LOAD:
        vector_load(&flight->vector, reduction, step->to.at, step->nbytes);
        break;
    case STEP_REDUCE:
        reduction->reduce(at(flight, step->to), at(flight, step->from), at(flight, step->other), count);
        break;
    case STEP_SCALE:
        if (reduction->postscale != 1.0)
            reduction->scale(at(flight, step->to), at(flight, step->to), reduction->postscale, count);
        break;
    case STEP_STORE:
        vector_store(&flight->vector, step->from.at, step->nbytes);
        break;
    case STEP_COPY:
        if (at(flight, step->to) != at(flight, step->from))
            span_copy(at(flight, step->to), at(flight, step->from), step->nbytes);
        break;
    case STEP_ENCODE:
    case STEP_RECODE:
    case STEP_DECODE:
    case STEP_COMBINE:
        flight->material.act(flight->material.arg, step, flight->spaces);
        break;
    default:
        break;
    }
}

static bool advance(struct flight *flight)
{
    bool progress = false;
    for (struct transfer *moved; (moved = transfer_queue_pop(&flight->moved)); progress = true)
        end(flight, (int)((struct flown *)moved - flight->steps));
    for (size_t nbytes = 0; flight->ready_begin < flight->ready_end && nbytes < LOCAL_BYTES && !flight->run->failure.status;
         progress = true) {
        const int index = flight->ready[flight->ready_begin++];
        const struct step *step = &flight->schedule.steps[index];
        act(flight, step);
        end(flight, index);
        nbytes += step->values.nbytes ? step->values.nbytes : step->nbytes;
    }
    return progress;
}

// ------------------------------------------------------------------------------------------------------------ flights

static bool moves_little(const struct schedule *schedule)
{
    size_t total = 0;
    for (int i = 0; i < schedule->count && total <= URGENT_BYTES; i++)
        total += schedule->steps[i].kind == STEP_SEND ? schedule->steps[i].nbytes : 0;
    return total <= URGENT_BYTES;
}

// Who waits for whom, and the numbers of the messages.
static void wire(struct flight *flight)
{
    for (int i = 0; i < flight->schedule.count; i++)
        flight->steps[i] = (struct flown){.first = STEP_NONE};
    // Backwards, so that those that wait for one step begin in the order in which they were written.
    for (int i = flight->schedule.count - 1; i >= 0; i--) {
        for (int w = STEP_WAITS - 1; w >= 0; w--) {
            const int before = flight->schedule.steps[i].after[w];
            if (before == STEP_NONE)
                continue;
            flight->steps[i].waits++;
            flight->steps[i].next[w] = flight->steps[before].first;
            flight->steps[before].first = STEP_WAITS * i + w;
        }
    }
    for (int i = 0; i < flight->schedule.count; i++) {
        const struct step *step = &flight->schedule.steps[i];
        struct flown *flown = &flight->steps[i];
        if (step->kind == STEP_SEND) {
            struct link *link = group_link(flight->run, flight->group, step->peer);
            flown->number = link_number_send(link, flight->execution);
            run_message_bytes(flight->run, link, step->nbytes);
        } else if (step->kind == STEP_RECEIVE) {
            flown->number = link_number_recv(group_link(flight->run, flight->group, step->peer), flight->execution);
        }
    }
}

static uint64_t execution_of(const struct run *run, const struct material *material)
{
    if (material->meeting)
        return LINK_MEETING | material->meeting;
    return material->execution ? material->execution : run->connections.started;
}

bhvd_status flight_start(struct run *run, const struct group *group, struct schedule *schedule, const struct material *material,
                         void (*ended)(void *arg, bhvd_status status), void *arg, struct flight **out)
{
    struct flight *flight = malloc(sizeof *flight);
    const size_t count = (size_t)schedule->count;
    if (!flight) {
        schedule_fini(schedule);
        return run_fail(run, BHVD_ERR_SYSTEM, "no memory for %zu steps", count);
    }
    *flight = (struct flight){.run = run, .group = group, .schedule = *schedule, .material = *material, .left = schedule->count,
                              .execution = execution_of(run, material),
                              .ended = ended, .arg = arg};
    *schedule = (struct schedule){0};
    transfer_queue_init(&flight->moved);
    flight->steps = malloc((count + 1) * sizeof *flight->steps);
    flight->ready = malloc((count + 1) * sizeof *flight->ready);
    if (flight->schedule.failed || !flight->steps || !flight->ready || !take_memory(flight)) {
        const size_t *spaces = flight->schedule.space_nbytes, nbytes = spaces[IN_VECTOR] + spaces[IN_SCRATCH];
        flight_free(flight);
        return run_fail(run, BHVD_ERR_SYSTEM, "no memory for a fusion buffer of %zu bytes and %zu steps", nbytes, count);
    }
    flight->is_urgent = moves_little(&flight->schedule);
    wire(flight);
    *run->executor.tail = flight;
    run->executor.tail = &flight->next;
    if (out)
        *out = flight;
    for (int i = 0; i < flight->schedule.count; i++) {
        const struct step *step = &flight->schedule.steps[i];
        if (step->after[0] == STEP_NONE && step->after[1] == STEP_NONE)
            begin(flight, i);
    }
    advance(flight);
    return BHVD_OK;
}

bool flight_is_over(const struct flight *flight) { return flight->left == 0; }

static int is_over(struct run *run, void *flight)
{
    (void)run;
    return flight_is_over(flight);
}

void flight_drop(struct run *run, struct flight *flight)
{
    unlink_flight(&run->executor, flight);
    flight_free(flight);
}

bhvd_status flight_run(struct run *run, const struct group *group, struct schedule *schedule, const struct material *material)
{
    struct flight *flight;
    bhvd_status status = flight_start(run, group, schedule, material, NULL, NULL, &flight);
    if (status)
        return status;
    status = run_until(run, is_over, flight, -1);
    flight_drop(run, flight);
    return status;
}

// -------------------------------------------------------------------------------------------------------------- plans

struct schedule *plan_begin(struct plan *plan, const struct group *group)
{
    plan->made = true;
    plan->group = group;
    schedule_init(&plan->schedule, group->size, group->rank);
    return &plan->schedule;
}

bhvd_status plan_run(struct run *run, struct plan *plan)
{
    struct task *task = plan->task;
    plan->task = NULL;
    bhvd_status status = task ? task_run(run, task) : flight_run(run, plan->group, &plan->schedule, &plan->material);
    plan_fini(run, plan);
    return status;
}

void plan_fini(struct run *run, struct plan *plan)
{
    if (plan->task)
        plan->task->destroy(run, plan->task);
    schedule_fini(&plan->schedule);
    span_list_fini(&plan->list);
    if (plan->release)
        plan->release(plan->material.arg);
    *plan = (struct plan){0};
}

// ----------------------------------------------------------------------------------------------------------- executor

static void end_flight(struct run *run, struct flight *flight, bhvd_status status)
{
    void (*ended)(void *, bhvd_status) = flight->ended;
    void *arg = flight->arg;
    if (flight->execution & LINK_MEETING)
        end_meeting(flight);
    unlink_flight(&run->executor, flight);
    flight_free(flight);
    ended(arg, status);
}

bool executor_advance(struct run *run)
{
    bool progress = false;
    for (struct flight *flight = run->executor.head, *next; flight && !run->failure.status; flight = next) {
        progress |= advance(flight);
        next = flight->next;
        if (flight->left == 0 && flight->ended) {
            end_flight(run, flight, BHVD_OK);
            progress = true;
        }
    }
    return tasks_advance(run) || progress;
}

void executor_abort(struct run *run)
{
    tasks_abort(run);
    for (struct flight *flight = run->executor.head, *next; flight; flight = next) {
        next = flight->next;
        if (flight->ended)
            end_flight(run, flight, run->failure.status);
    }
}

bool executor_has_state(const struct run *run, const void *state)
{
    const struct flight *flight = run->executor.head;
    while (flight && !(state && flight->material.state == state))
        flight = flight->next;
    return flight || tasks_have_state(run, state);
}

bool executor_has_group(const struct run *run, const struct group *group)
{
    const struct flight *flight = run->executor.head;
    while (flight && flight->group != group)
        flight = flight->next;
    return flight;
}

uint64_t executor_oldest(const struct run *run)
{
    const struct flight *flight = run->executor.head;
    while (flight && flight->execution & LINK_MEETING)
        flight = flight->next;
    const struct task *task = run->executor.tasks;      // whose flights start later than it does
    if (!flight || !task)
        return flight ? flight->execution : task ? task->execution : 0;
    return flight->execution < task->execution ? flight->execution : task->execution;
}

void executor_fini(struct run *run)
{
    while (run->executor.head) {
        struct flight *flight = run->executor.head;
        unlink_flight(&run->executor, flight);
        flight_free(flight);
    }
}
