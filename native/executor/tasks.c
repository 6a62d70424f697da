#include "executor/task.h"

// --------------------------------------------------------------------------------------------------------------- plans

struct schedule *plan_begin(struct plan *plan, const struct group *group)
{
    plan->is_planned = true;
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
    task_advance_within(exec, task);
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
    return advance_all(exec, task_advance_within) || progress;
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
    while (task && !(memory && task->operands.exclusive_memory == memory))
        task = task->next;
    return task;
}

bool tasks_use_group(const struct executor *exec, const struct group *group)
{
    const struct task *task = exec->tasks.head;
    while (task && task->group->id != group->id)        // or one derived from it
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
