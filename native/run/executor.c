#include "run/executor.h"

static void end(struct run *run, struct task *task, bhvd_status status)
{
    void (*ended)(void *, bhvd_status) = task->ended;
    void *arg = task->arg;
    task_drop(run, task);
    ended(arg, status);
}

void task_start(struct run *run, struct task *task, void (*ended)(void *arg, bhvd_status status), void *arg)
{
    task->ended = ended;
    task->arg = arg;
    task->awaited = -1;
    fifo_put(&run->executor.tasks, task, next);
    task->advance(run, task);
}

void task_drop(struct run *run, struct task *task)
{
    struct task **at = &run->executor.tasks.head;
    while (*at != task)
        at = &(*at)->next;
    fifo_remove(&run->executor.tasks, at, next);
    task->destroy(run, task);
}

static int is_over(struct run *run, void *task)
{
    (void)run;
    return ((const struct task *)task)->is_over;
}

bhvd_status task_execute(struct run *run, struct task *task)
{
    task_start(run, task, NULL, NULL);
    bhvd_status status = run_until(run, is_over, task, -1);
    task_drop(run, task);
    return status;
}

// ----------------------------------------------------------------------------------------------------------- all tasks

static bool advance_all(struct run *run, bool within_host)
{
    bool progress = false;
    for (struct task *task = run->executor.tasks.head, *next; task && !run->failure.status; task = next) {
        const bool is_due = within_host == (task->can_advance != NULL);
        progress |= is_due && task->advance(run, task);
        next = task->next;
        if (is_due && task->is_over && task->ended && !run->failure.status) {
            end(run, task, BHVD_OK);
            progress = true;
        }
    }
    return progress;
}

// Messages first, so that local work of a large operation does not delay the messages of a small one.
bool executor_advance(struct run *run)
{
    bool progress = advance_all(run, false);
    return advance_all(run, true) || progress;
}

bool executor_can_advance(struct run *run)
{
    struct task *task = run->executor.tasks.head;
    while (task && !(task->can_advance && task->can_advance(run, task)))
        task = task->next;
    return task;
}

// Ending a two-level task destroys its inner tasks too, so start again at the head each time.
void executor_abort(struct run *run)
{
    for (struct task *task = run->executor.tasks.head; task;) {
        if (!task->ended) {
            task = task->next;
            continue;
        }
        end(run, task, run->failure.status);
        task = run->executor.tasks.head;
    }
}

bool executor_uses_memory(const struct run *run, const void *memory)
{
    const struct task *task = run->executor.tasks.head;
    while (task && !(memory && task->exclusive_memory == memory))
        task = task->next;
    return task;
}

bool executor_has_group(const struct run *run, const struct group *group)
{
    const struct task *task = run->executor.tasks.head;
    while (task && task->group != group)
        task = task->next;
    return task;
}

// Executions start in numerical order, and a task stays in the list until its inner tasks are over.
uint64_t executor_oldest(const struct run *run)
{
    const struct task *task = run->executor.tasks.head;
    while (task && task->execution & LINK_PAIRWISE)
        task = task->next;
    return task ? task->execution : 0;
}

int executor_awaited(const struct run *run)
{
    const struct task *task = run->executor.tasks.head;
    while (task && task->awaited < 0)
        task = task->next;
    return task ? task->awaited : -1;
}

void executor_fini(struct run *run)
{
    while (run->executor.tasks.head)
        task_drop(run, run->executor.tasks.head);
}
