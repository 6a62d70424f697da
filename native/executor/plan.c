#include "executor/plan.h"

#include <stdlib.h>
#include <string.h>

#include "base/size.h"

enum { PRIORITY_BYTES = 64 << 10 };

// The state of a running step.
struct step_state {
    struct transfer transfer;
    uint32_t number;            // of the message
    int waits;                  // number of unfinished steps that it waits for
    int next[STEP_WAITS];       // for each step that it waits for: the next edge from there, as STEP_WAITS * step + index
    int first;                  // first edge to a step that waits for this one
};

struct schedule_task {
    struct task task;
    struct executor *exec;
    struct schedule schedule;
    struct operands operands;
    unsigned char *buffers[BUFFER_COUNT];
    bool packed;                            // the vector is in `memory`; else it is the result of the only tensor
    void *memory;                           // of vector and scratch
    struct step_state *steps;
    int *ready;                             // local steps that wait for nothing, in order
    int ready_begin, ready_end;
    int remaining;                          // unfinished steps
    struct transfer_queue moved;            // finished transfers
    bool has_priority;                      // small enough to go before other executions' messages
};

static unsigned char *at(const struct schedule_task *running, struct location location)
{
    return location_pointer(running->buffers, location);
}

// ------------------------------------------------------------------------------------------------------------- memory

// Allocates the vector, unless there is only one tensor, whose result it can be, and the scratch.
static bool take_memory(struct schedule_task *running)
{
    const size_t *nbytes = running->schedule.buffer_nbytes;
    const struct span_list *list = running->operands.list;
    running->packed = list && (list->count != 1 || !list->spans[0].dst);
    const size_t vector = !list || running->packed ? size_round_up(nbytes[FUSION_BUFFER], CACHE_LINE) : 0;
    const size_t total = vector + size_round_up(nbytes[SCRATCH_BUFFER], CACHE_LINE);
    if (total && !(running->memory = executor_acquire(running->exec, total)))
        return false;
    running->buffers[INPUT_BUFFER] = (unsigned char *)running->operands.input;
    running->buffers[OUTPUT_BUFFER] = running->operands.output;
    running->buffers[FUSION_BUFFER] = list && !running->packed ? list->spans[0].dst : running->memory;
    running->buffers[SCRATCH_BUFFER] = (unsigned char *)running->memory + vector;
    return true;
}

static void end_pairwise(const struct schedule_task *running)
{
    for (int i = 0; i < running->schedule.count; i++) {
        const struct step *step = &running->schedule.steps[i];
        if (step->kind == STEP_SEND || step->kind == STEP_RECEIVE)
            link_end_pairwise(group_link(running->exec, running->task.group, step->peer), running->task.execution);
    }
}

static void destroy(struct executor *exec, struct task *task)
{
    struct schedule_task *running = (struct schedule_task *)task;
    executor_release(exec, running->memory);
    schedule_fini(&running->schedule);
    free(running->steps);
    free(running->ready);
    free(running);
}

// -------------------------------------------------------------------------------------------------------------- steps

static void post(struct schedule_task *running, int index)
{
    const struct step *step = &running->schedule.steps[index];
    struct step_state *state = &running->steps[index];
    struct link *link = group_link(running->exec, running->task.group, step->peer);
    if (step->kind == STEP_SEND)
        link_send_numbered(link, running->task.execution, state->number, &state->transfer, at(running, step->from), step->nbytes,
                           &running->moved, running->has_priority);
    else
        link_recv_numbered(link, running->task.execution, state->number, &state->transfer, at(running, step->to), step->nbytes,
                           &running->moved);
}

// Starts a step that no longer waits.
static void begin(struct schedule_task *running, int index)
{
    const enum step_kind kind = running->schedule.steps[index].kind;
    if (kind == STEP_SEND || kind == STEP_RECEIVE)
        post(running, index);
    else
        running->ready[running->ready_end++] = index;
}

static void end(struct schedule_task *running, int index)
{
    running->remaining--;
    for (int edge = running->steps[index].first; edge != STEP_NONE;) {
        const int waiting = edge / STEP_WAITS;
        edge = running->steps[waiting].next[edge % STEP_WAITS];
        if (--running->steps[waiting].waits == 0)
            begin(running, waiting);
    }
}

// Copies the tensors' values into this part of the vector, prescaled. Once per part, before any other step on it.
static void load(const struct schedule_task *running, size_t begin, size_t nbytes)
{
    const struct reduction *reduction = &running->operands.reduction;
    struct span_cursor cursor = span_cursor_at(running->operands.list, begin);
    unsigned char *to = running->buffers[FUSION_BUFFER] + begin;
    const unsigned char *src;
    unsigned char *dst;
    for (size_t n; (n = span_cursor_next(&cursor, nbytes, &src, &dst)); nbytes -= n, to += n) {
        if (reduction->prescale != 1.0)
            reduction->scale(to, src, reduction->prescale, n / bhvd_dtype_size(reduction->dtype));
        else if (to != src)
            memcpy(to, src, n);
    }
}

// Writes the final values of this part to the tensors.
static void store(const struct schedule_task *running, size_t begin, size_t nbytes)
{
    struct span_cursor cursor = span_cursor_at(running->operands.list, begin);
    if (running->packed)
        span_unpack(&cursor, running->buffers[FUSION_BUFFER] + begin, nbytes);
}

static void run_step(const struct schedule_task *running, const struct step *step)
{
    const struct reduction *reduction = &running->operands.reduction;
    const size_t element = bhvd_dtype_size(reduction->dtype), count = element ? step->nbytes / element : 0;
    switch (step->kind) {
    case STEP_LOAD:
        load(running, step->to.offset, step->nbytes);
        break;
    case STEP_REDUCE:
        reduction->reduce(at(running, step->to), at(running, step->from), at(running, step->other), count);
        break;
    case STEP_SCALE:
        if (reduction->postscale != 1.0)
            reduction->scale(at(running, step->to), at(running, step->to), reduction->postscale, count);
        break;
    case STEP_STORE:
        store(running, step->from.offset, step->nbytes);
        break;
    case STEP_COPY:
        if (at(running, step->to) != at(running, step->from))
            span_copy(at(running, step->to), at(running, step->from), step->nbytes);
        break;
    case STEP_ENCODE:
    case STEP_REENCODE:
    case STEP_DECODE:
    case STEP_COMBINE:
        running->operands.run_custom_step(running->operands.arg, step, running->buffers);
        break;
    default:
        break;
    }
}

static bool advance(struct executor *exec, struct task *task)
{
    struct schedule_task *running = (struct schedule_task *)task;
    bool progress = false;
    for (struct transfer *moved; (moved = fifo_take(&running->moved, next)); progress = true)
        end(running, (int)((struct step_state *)moved - running->steps));
    for (size_t nbytes = 0; running->ready_begin < running->ready_end && nbytes < LOCAL_BYTES &&
         !exec->failure.status; progress = true) {
        const int index = running->ready[running->ready_begin++];
        const struct step *step = &running->schedule.steps[index];
        run_step(running, step);
        end(running, index);
        nbytes += step->values.nbytes ? step->values.nbytes : step->nbytes;
    }
    if (running->remaining == 0 && !task->is_complete && task->execution & LINK_PAIRWISE)
        end_pairwise(running);
    task->is_complete = running->remaining == 0 && !exec->failure.status;
    return progress;
}

// -------------------------------------------------------------------------------------------------- running schedules

static bool moves_little(const struct schedule *schedule)
{
    size_t total = 0;
    for (int i = 0; i < schedule->count && total <= PRIORITY_BYTES; i++)
        total += schedule->steps[i].kind == STEP_SEND ? schedule->steps[i].nbytes : 0;
    return total <= PRIORITY_BYTES;
}

// Links each step to the steps that wait for it, and numbers the messages.
static void number_and_link_steps(struct schedule_task *running)
{
    for (int i = 0; i < running->schedule.count; i++)
        running->steps[i] = (struct step_state){.first = STEP_NONE};
    // Backwards, so that the steps that wait for the same one begin in the order in which they were written.
    for (int i = running->schedule.count - 1; i >= 0; i--) {
        for (int w = STEP_WAITS - 1; w >= 0; w--) {
            const int before = running->schedule.steps[i].after[w];
            if (before == STEP_NONE)
                continue;
            running->steps[i].waits++;
            running->steps[i].next[w] = running->steps[before].first;
            running->steps[before].first = STEP_WAITS * i + w;
        }
    }
    for (int i = 0; i < running->schedule.count; i++) {
        const struct step *step = &running->schedule.steps[i];
        struct step_state *state = &running->steps[i];
        if (step->kind == STEP_SEND) {
            struct link *link = group_link(running->exec, running->task.group, step->peer);
            state->number = link_number_send(link, running->task.execution);
            executor_count_message(running->exec, link, step->nbytes);
        } else if (step->kind == STEP_RECEIVE) {
            state->number = link_number_recv(group_link(running->exec, running->task.group, step->peer), running->task.execution);
        }
    }
}

// Creates the task of a schedule and moves the schedule into it. NULL: no memory, and the executor has failed.
static struct task *task_of(struct executor *exec, const struct group *group, struct schedule *schedule,
                            const struct operands *operands)
{
    struct schedule_task *running = malloc(sizeof *running);
    const size_t count = (size_t)schedule->count;
    if (!running) {
        schedule_fini(schedule);
        executor_fail(exec, BHVD_ERR_SYSTEM, "no memory for %zu steps", count);
        return NULL;
    }
    const uint64_t execution = operands->execution ? operands->execution : exec->connections.started;
    *running = (struct schedule_task){
        .task = {.execution = execution, .group = group, .exclusive_memory = operands->exclusive_memory,
                 .advance = advance, .destroy = destroy},
        .exec = exec, .schedule = *schedule, .operands = *operands, .remaining = schedule->count};
    *schedule = (struct schedule){0};
    running->steps = malloc((count + 1) * sizeof *running->steps);
    running->ready = malloc((count + 1) * sizeof *running->ready);
    if (running->schedule.failed || !running->steps || !running->ready || !take_memory(running)) {
        const size_t *buffers = running->schedule.buffer_nbytes, nbytes = buffers[FUSION_BUFFER] + buffers[SCRATCH_BUFFER];
        destroy(exec, &running->task);
        executor_fail(exec, BHVD_ERR_SYSTEM, "no memory for a fusion buffer of %zu bytes and %zu steps", nbytes, count);
        return NULL;
    }
    running->has_priority = moves_little(&running->schedule);
    number_and_link_steps(running);
    for (int i = 0; i < running->schedule.count; i++) {
        const struct step *step = &running->schedule.steps[i];
        if (step->after[0] == STEP_NONE && step->after[1] == STEP_NONE)
            begin(running, i);
    }
    return &running->task;
}

// -------------------------------------------------------------------------------------------------------------- plans

struct schedule *plan_begin(struct plan *plan, const struct group *group)
{
    plan->is_planned = true;
    plan->group = group;
    schedule_init(&plan->schedule, group->size, group->rank);
    return &plan->schedule;
}

static struct task *take_task(struct executor *exec, struct plan *plan)
{
    struct task *task = plan->task;
    plan->task = NULL;
    return task ? task : task_of(exec, plan->group, &plan->schedule, &plan->operands);
}

bhvd_status plan_start(struct executor *exec, struct plan *plan, void (*on_complete)(void *arg, bhvd_status status), void *arg,
                       struct task **out)
{
    struct task *task = take_task(exec, plan);
    if (!task)
        return exec->failure.status;
    if (out)
        *out = task;
    task_start(exec, task, on_complete, arg);
    return BHVD_OK;
}

bhvd_status plan_execute(struct executor *exec, struct plan *plan)
{
    struct task *task = take_task(exec, plan);
    bhvd_status status = task ? task_execute(exec, task) : exec->failure.status;
    plan_fini(exec, plan);
    return status;
}

void plan_fini(struct executor *exec, struct plan *plan)
{
    if (plan->task)
        plan->task->destroy(exec, plan->task);
    schedule_fini(&plan->schedule);
    span_list_fini(&plan->list);
    if (plan->release)
        plan->release(plan->operands.arg);
    *plan = (struct plan){0};
}
