#include "executor/task.h"

static void complete(struct executor *exec, struct task *task, bhvd_status status)
{
    void (*on_complete)(void *, bhvd_status) = task->on_complete;
    void *arg = task->arg;
    task_destroy(exec, task);
    on_complete(arg, status);
}

void task_start(struct executor *exec, struct task *task, void (*on_complete)(void *arg, bhvd_status status), void *arg)
{
    task->on_complete = on_complete;
    task->arg = arg;
    task->awaited = -1;
    fifo_put(&exec->tasks, task, next);
    task->advance(exec, task);
}

void task_destroy(struct executor *exec, struct task *task)
{
    struct task **at = &exec->tasks.head;
    while (*at != task)
        at = &(*at)->next;
    fifo_remove(&exec->tasks, at, next);
    task->destroy(exec, task);
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
    task_destroy(exec, task);
    return status;
}

// ----------------------------------------------------------------------------------------------------------- all tasks

static bool advance_all(struct executor *exec, bool within_host)
{
    bool progress = false;
    for (struct task *task = exec->tasks.head, *next; task && !exec->failure.status; task = next) {
        const bool is_due = within_host == (task->can_advance != NULL);
        progress |= is_due && task->advance(exec, task);
        next = task->next;
        if (is_due && task->is_complete && task->on_complete && !exec->failure.status) {
            complete(exec, task, BHVD_OK);
            progress = true;
        }
    }
    return progress;
}

// Messages first, so that local work of a large operation does not delay the messages of a small one.
bool tasks_advance(struct executor *exec)
{
    bool progress = advance_all(exec, false);
    return advance_all(exec, true) || progress;
}

bool tasks_can_advance(struct executor *exec)
{
    struct task *task = exec->tasks.head;
    while (task && !(task->can_advance && task->can_advance(exec, task)))
        task = task->next;
    return task;
}

// Ending a two-level task destroys its inner tasks too, so start again at the head each time.
void tasks_abort(struct executor *exec)
{
    for (struct task *task = exec->tasks.head; task;) {
        if (!task->on_complete) {
            task = task->next;
            continue;
        }
        complete(exec, task, exec->failure.status);
        task = exec->tasks.head;
    }
}

bool tasks_use_memory(const struct executor *exec, const void *memory)
{
    const struct task *task = exec->tasks.head;
    while (task && !(memory && task->exclusive_memory == memory))
        task = task->next;
    return task;
}

bool tasks_use_group(const struct executor *exec, const struct group *group)
{
    const struct task *task = exec->tasks.head;
    while (task && task->group != group)
        task = task->next;
    return task;
}

// Executions start in numerical order, and a task stays in the list until its inner tasks are over.
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
        task_destroy(exec, exec->tasks.head);
}
