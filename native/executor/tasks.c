#include "executor/tasks.h"

#include "executor/task.h"

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

void task_start(struct executor *exec, struct task *task, void (*on_complete)(void *arg, bhvd_status status), void *arg)
{
    task->on_complete = on_complete;
    task->arg = arg;
    fifo_put(&exec->tasks, task, next);
    task_advance(exec, task);
    task_advance_within(exec, task);
}

static int is_complete(struct executor *exec, void *task)
{
    (void)exec;
    return ((const struct task *)task)->is_complete;
}

bhvd_status task_execute(struct executor *exec, struct task *task)
{
    task_start(exec, task, NULL, NULL);
    bhvd_status status = executor_wait(exec, is_complete, task, -1);
    remove_task(exec, task);
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
