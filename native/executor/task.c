#include "executor/task.h"

#include <stdlib.h>
#include <string.h>

enum {
    PRIORITY_BYTES = 64 << 10,
    LOCAL_BYTES = 256 << 10         // of local work per task before links are polled again
};

// The state of a step.
struct step_state {
    struct transfer transfer;
    uint32_t number;            // of the message
    int waits;                  // number of unfinished steps that it waits for
    int next[STEP_WAITS];       // for each step that it waits for: the next edge from there, as STEP_WAITS * step + index
    int first;                  // first edge to a step that waits for this one
};

static unsigned char *at(const struct task *task, struct location location)
{
    return location_pointer(task->buffers, location);
}

// ------------------------------------------------------------------------------------------------------------- memory

// Allocates the vector, unless there is only one tensor, whose result it can be, and the scratch.
static bool take_memory(struct task *task)
{
    const size_t *nbytes = task->plan->schedule.buffer_nbytes;
    const struct span_list *list = task->plan->operands.list;
    task->packed = list && (list->count != 1 || !list->spans[0].dst);
    const size_t vector = !list || task->packed ? size_round_up(nbytes[FUSION_BUFFER], CACHE_LINE) : 0;
    const size_t total = vector + size_round_up(nbytes[SCRATCH_BUFFER], CACHE_LINE);
    if (total && !(task->memory = executor_acquire(task->exec, total)))
        return false;
    task->buffers[INPUT_BUFFER] = (unsigned char *)task->plan->operands.input;
    task->buffers[OUTPUT_BUFFER] = task->plan->operands.output;
    task->buffers[FUSION_BUFFER] = list && !task->packed ? list->spans[0].dst : task->memory;
    task->buffers[SCRATCH_BUFFER] = (unsigned char *)task->memory + vector;
    return true;
}

static void end_pairwise(const struct task *task)
{
    for (int i = 0; i < task->plan->schedule.count; i++) {
        const struct step *step = &task->plan->schedule.steps[i];
        if (step->kind == STEP_SEND || step->kind == STEP_RECEIVE)
            link_end_pairwise(group_link(task->exec, task->plan->group, step->peer), task->execution);
    }
}

static void leave_slot(const struct task *task)
{
    if (task->plan->operands.local && task->plan->operands.local->users[task->slot] == task)
        task->plan->operands.local->users[task->slot] = NULL;
}

static void task_free(struct executor *exec, struct task *task)
{
    if (!task)
        return;
    leave_slot(task);
    executor_release(exec, task->memory);
    free(task->steps);
    free(task->ready);
    free(task);
}

// -------------------------------------------------------------------------------------------------------------- steps

static void post(struct task *task, int index)
{
    const struct step *step = &task->plan->schedule.steps[index];
    struct step_state *state = &task->steps[index];
    struct link *link = group_link(task->exec, task->plan->group, step->peer);
    if (step->kind == STEP_SEND)
        link_send_numbered(link, task->execution, state->number, &state->transfer, at(task, step->from), step->nbytes,
                           &task->moved, task->has_priority);
    else
        link_recv_numbered(link, task->execution, state->number, &state->transfer, at(task, step->to), step->nbytes,
                           &task->moved);
}

static bool is_within(enum step_kind kind) { return kind == STEP_REDUCE_WITHIN || kind == STEP_DISTRIBUTE_WITHIN; }

// Starts a step that no longer waits.
static void begin(struct task *task, int index)
{
    const enum step_kind kind = task->plan->schedule.steps[index].kind;
    if (kind == STEP_SEND || kind == STEP_RECEIVE)
        post(task, index);
    else if (!is_within(kind))
        task->ready[task->ready_end++] = index;
}

static void end(struct task *task, int index)
{
    task->remaining--;
    for (int edge = task->steps[index].first; edge != STEP_NONE;) {
        const int waiting = edge / STEP_WAITS;
        edge = task->steps[waiting].next[edge % STEP_WAITS];
        if (--task->steps[waiting].waits == 0)
            begin(task, waiting);
    }
}

// Copies the tensors' values into this part of the vector, prescaled. Once per part, before any other step on it.
static void load(const struct task *task, size_t begin, size_t nbytes)
{
    const struct reduction *reduction = &task->plan->operands.reduction;
    struct span_cursor cursor = span_cursor_at(task->plan->operands.list, begin);
    unsigned char *to = task->buffers[FUSION_BUFFER] + begin;
    for (struct span s; (s = span_cursor_next(&cursor, nbytes)).nbytes; nbytes -= s.nbytes, to += s.nbytes) {
        if (reduction->prescale != 1.0)
            reduction->scale(to, s.src, reduction->prescale, s.nbytes / bhvd_dtype_size(reduction->dtype));
        else if (to != s.src)
            memcpy(to, s.src, s.nbytes);
    }
}

static void run_step(const struct task *task, const struct step *step)
{
    const struct reduction *reduction = &task->plan->operands.reduction;
    const size_t element = bhvd_dtype_size(reduction->dtype), count = element ? step->nbytes / element : 0;
    switch (step->kind) {
    case STEP_LOAD:
        load(task, step->to.offset, step->nbytes);
        break;
    case STEP_REDUCE:
        reduction->reduce(at(task, step->to), at(task, step->from), at(task, step->other), count);
        break;
    case STEP_SCALE:
        if (reduction->postscale != 1.0)
            reduction->scale(at(task, step->to), at(task, step->to), reduction->postscale, count);
        break;
    case STEP_STORE:
        if (task->packed) {
            struct span_cursor cursor = span_cursor_at(task->plan->operands.list, step->from.offset);
            span_unpack(&cursor, at(task, step->from), step->nbytes);
        }
        break;
    case STEP_COPY:
        if (at(task, step->to) != at(task, step->from))
            span_copy(at(task, step->to), at(task, step->from), step->nbytes);
        break;
    case STEP_ENCODE:
    case STEP_REENCODE:
    case STEP_DECODE:
    case STEP_COMBINE:
        task->plan->operands.run_custom_step(task->plan->operands.arg, step, task->buffers);
        break;
    default:
        break;
    }
}

static void check_complete(struct executor *exec, struct task *task)
{
    if (task->remaining == 0 && !task->is_complete && task->execution & LINK_PAIRWISE)
        end_pairwise(task);
    task->is_complete = task->remaining == 0 && !exec->failure.status;
}

static bool task_advance(struct executor *exec, struct task *task)
{
    bool progress = false;
    for (struct transfer *moved; (moved = fifo_take(&task->moved, next)); progress = true)
        end(task, (int)((struct step_state *)moved - task->steps));
    for (size_t nbytes = 0; task->ready_begin < task->ready_end && nbytes < LOCAL_BYTES && !exec->failure.status; progress = true) {
        const int index = task->ready[task->ready_begin++];
        const struct step *step = &task->plan->schedule.steps[index];
        run_step(task, step);
        end(task, index);
        nbytes += step->values.nbytes ? step->values.nbytes : step->nbytes;
    }
    check_complete(exec, task);
    return progress;
}

// -------------------------------------------------------------------------------------------------------- within the host

static int next_host_step(const struct task *task, int index)
{
    while (index < task->plan->schedule.count && !is_within(task->plan->schedule.steps[index].kind))
        index++;
    return index;
}

// Pipelines of one slot run one after the other, those of an earlier execution first: tasks take a free slot in this order because
// they are advanced in it.
static bool may_take_slot(const struct task *task)
{
    const void *user = task->plan->operands.local->users[task->slot];
    return !user || user == task;
}

static bool may_begin_host_step(const struct task *task)
{
    return task->host_step < task->plan->schedule.count && task->steps[task->host_step].waits == 0 && may_take_slot(task);
}

static void end_host_step(struct executor *exec, struct task *task)
{
    const int index = task->host_step;
    pipeline_end(exec, task->pipeline);
    task->pipeline = NULL;
    task->host_step = next_host_step(task, index + 1);
    if (task->host_step == task->plan->schedule.count)
        leave_slot(task);
    end(task, index);
}

static bool task_advance_host_step(struct executor *exec, struct task *task)
{
    const struct operands *operands = &task->plan->operands;
    struct bhvd_sent *sent_before = exec->sent;
    bool progress = false;
    task->awaited = -1;
    if (task->host_step < task->plan->schedule.count && may_take_slot(task))
        operands->local->users[task->slot] = task;
    exec->sent = task->sent;
    for (size_t nbytes = 0; nbytes < LOCAL_BYTES && !exec->failure.status; progress = true) {
        if (!task->pipeline) {
            if (!may_begin_host_step(task))
                break;
            task->pipeline = operands->begin_pipeline(operands->arg, exec, task->slot,
                                                      &task->plan->schedule.steps[task->host_step], task->buffers);
        } else if (pipeline_is_complete(task->pipeline)) {
            end_host_step(exec, task);
        } else if (pipeline_advance(exec, task->pipeline)) {
            nbytes += size_min(task->plan->schedule.steps[task->host_step].values.nbytes, SHM_BUFFER_BYTES);
        } else {
            task->awaited = operands->local->ranks[task->pipeline->slowest];
            pipeline_can_advance(exec, task->pipeline);    // has the awaited member left?
            break;
        }
        exec->moved++;
    }
    exec->sent = sent_before;
    check_complete(exec, task);
    return progress;
}

static bool task_can_advance(struct executor *exec, struct task *task)
{
    if (task->ready_begin < task->ready_end || task->moved.head)
        return true;
    if (task->pipeline)
        return pipeline_is_complete(task->pipeline) || pipeline_can_advance(exec, task->pipeline);
    return may_begin_host_step(task);
}

// -------------------------------------------------------------------------------------------------------------- creation

static bool moves_little(const struct schedule *schedule)
{
    size_t total = 0;
    for (int i = 0; i < schedule->count && total <= PRIORITY_BYTES; i++)
        total += schedule->steps[i].kind == STEP_SEND ? schedule->steps[i].nbytes : 0;
    return total <= PRIORITY_BYTES;
}

// Links each step to the steps that wait for it, and numbers the messages.
static void number_and_link_steps(struct task *task)
{
    for (int i = 0; i < task->plan->schedule.count; i++)
        task->steps[i] = (struct step_state){.first = STEP_NONE};
    // Backwards, so that the steps that wait for the same one begin in the order in which they were written.
    for (int i = task->plan->schedule.count - 1; i >= 0; i--) {
        for (int w = STEP_WAITS - 1; w >= 0; w--) {
            const int before = task->plan->schedule.steps[i].after[w];
            if (before == STEP_NONE)
                continue;
            task->steps[i].waits++;
            task->steps[i].next[w] = task->steps[before].first;
            task->steps[before].first = STEP_WAITS * i + w;
        }
    }
    for (int i = 0; i < task->plan->schedule.count; i++) {
        const struct step *step = &task->plan->schedule.steps[i];
        struct step_state *state = &task->steps[i];
        if (step->kind == STEP_SEND) {
            struct link *link = group_link(task->exec, task->plan->group, step->peer);
            state->number = link_number_send(link, task->execution);
            executor_count_message(task->exec, link, step->nbytes);
        } else if (step->kind == STEP_RECEIVE) {
            state->number = link_number_recv(group_link(task->exec, task->plan->group, step->peer), task->execution);
        }
    }
}

static struct task *task_create(struct executor *exec, struct plan *plan)
{
    const struct schedule *schedule = &plan->schedule;
    const size_t count = (size_t)schedule->count;
    const uint64_t execution = plan->operands.execution ? plan->operands.execution : exec->connections.started;
    struct task *task = malloc(sizeof *task);
    if (task)
        *task = (struct task){
            .plan = plan, .execution = execution, .exec = exec, .remaining = schedule->count,
            .slot = 1 + (int)(execution % (SHM_SLOTS - 1)), .awaited = -1, .sent = exec->sent,
            .steps = malloc((count + 1) * sizeof *task->steps), .ready = malloc((count + 1) * sizeof *task->ready)};
    if (!task || schedule->failed || !task->steps || !task->ready || !take_memory(task)) {
        task_free(exec, task);
        executor_fail(exec, BHVD_ERR_SYSTEM, "no memory for a fusion buffer of %zu bytes and %zu steps",
                      schedule->buffer_nbytes[FUSION_BUFFER] + schedule->buffer_nbytes[SCRATCH_BUFFER], count);
        return NULL;
    }
    task->has_priority = moves_little(schedule);
    task->host_step = next_host_step(task, 0);
    number_and_link_steps(task);
    for (int i = 0; i < schedule->count; i++) {
        if (task->steps[i].waits == 0)
            begin(task, i);
    }
    return task;
}

// --------------------------------------------------------------------------------------------------------------- plans

struct schedule *plan_begin(struct plan *plan, const struct group *group)
{
    plan->group = group;
    schedule_init(&plan->schedule, group->size, group->rank);
    return &plan->schedule;
}

void plan_fini(struct plan *plan)
{
    schedule_fini(&plan->schedule);
    span_list_fini(&plan->list);
    if (plan->release)
        plan->release(plan->operands.arg);
    *plan = (struct plan){0};
}

static void remove_task(struct executor *exec, struct task *task)
{
    struct task **at = &exec->tasks.head;
    while (*at != task)
        at = &(*at)->next;
    fifo_remove(&exec->tasks, at, next);
    task_free(exec, task);
}

static void complete(struct executor *exec, struct task *task, bhvd_status status)
{
    void (*on_complete)(void *, bhvd_status) = task->on_complete;
    void *arg = task->arg;
    remove_task(exec, task);
    on_complete(arg, status);
}

// on_complete NULL: the caller waits for is_complete, and removes it. NULL: no memory.
static struct task *start(struct executor *exec, struct plan *plan, void (*on_complete)(void *arg, bhvd_status status), void *arg)
{
    struct task *task = task_create(exec, plan);
    if (!task)
        return NULL;
    task->on_complete = on_complete;
    task->arg = arg;
    fifo_put(&exec->tasks, task, next);
    task_advance(exec, task);
    task_advance_host_step(exec, task);
    return task;
}

bhvd_status plan_start(struct executor *exec, struct plan *plan, void (*on_complete)(void *arg, bhvd_status status), void *arg)
{
    return start(exec, plan, on_complete, arg) ? BHVD_OK : exec->failure.status;
}

static int is_complete(struct executor *exec, void *task)
{
    (void)exec;
    return ((const struct task *)task)->is_complete;
}

bhvd_status plan_execute(struct executor *exec, struct plan *plan)
{
    struct task *task = start(exec, plan, NULL, NULL);
    bhvd_status status = exec->failure.status;
    if (task) {
        status = executor_wait(exec, is_complete, task, -1);
        remove_task(exec, task);
    }
    plan_fini(plan);
    return status;
}

// ----------------------------------------------------------------------------------------------------------- all tasks

static bool advance_all(struct executor *exec, bool (*advance)(struct executor *exec, struct task *task))
{
    bool progress = false;
    for (struct task *task = exec->tasks.head, *next; task && !exec->failure.status; task = next) {
        progress |= advance(exec, task);
        next = task->next;
        if (task->is_complete && task->on_complete && !exec->failure.status) {
            complete(exec, task, BHVD_OK);
            progress = true;
        }
    }
    return progress;
}

// Messages first, so that work of a large operation within the host does not delay the messages of a small one.
bool tasks_advance(struct executor *exec)
{
    bool progress = advance_all(exec, task_advance);
    return advance_all(exec, task_advance_host_step) || progress;
}

bool tasks_can_advance(struct executor *exec)
{
    struct task *task = exec->tasks.head;
    while (task && !task_can_advance(exec, task))
        task = task->next;
    return task;
}

void tasks_abort(struct executor *exec)
{
    for (struct task *task = exec->tasks.head, *next; task; task = next) {
        next = task->next;
        if (task->on_complete)
            complete(exec, task, exec->failure.status);
    }
}

bool tasks_use_memory(const struct executor *exec, const void *memory)
{
    const struct task *task = exec->tasks.head;
    while (task && !(memory && task->plan->operands.exclusive_memory == memory))
        task = task->next;
    return task;
}

bool tasks_use_group(const struct executor *exec, const struct group *group)
{
    const struct task *task = exec->tasks.head;
    while (task && task->plan->group->id != group->id)      // or one derived from it
        task = task->next;
    return task;
}

// Executions start in numerical order.
uint64_t tasks_oldest_execution(const struct executor *exec)
{
    const struct task *task = exec->tasks.head;
    while (task && task->execution & LINK_PAIRWISE)
        task = task->next;
    return task ? task->execution : 0;
}

int tasks_awaited_rank(const struct executor *exec)
{
    const struct task *task = exec->tasks.head;
    while (task && task->awaited < 0)
        task = task->next;
    return task ? task->awaited : -1;
}

void tasks_fini(struct executor *exec)
{
    while (exec->tasks.head)
        remove_task(exec, exec->tasks.head);
}
