#include "run/task.h"

static void unlink_task(struct executor *executor, const struct task *task)
{
    struct task **at = &executor->tasks.head;
    while (*at != task)
        at = &(*at)->next;
    fifo_remove(&executor->tasks, at, next);
}

// On the account of its execution.
static bool advance(struct executor_context *run, struct task *task)
{
    const struct wire wire_before = run->wire;
    struct sent *sent_before = run->sent;
    run->wire = task->wire;
    run->sent = task->sent;
    const bool progress = task->advance(run, task);
    run->wire = wire_before;
    run->sent = sent_before;
    return progress;
}

static void end(struct executor_context *run, struct task *task, bhvd_status status)
{
    unlink_task(&run->executor, task);
    if (task->ended)
        task->ended(task->arg, status);
    task->destroy(run, task);
}

void task_start(struct executor_context *run, struct task *task, void (*ended)(void *arg, bhvd_status status), void *arg)
{
    task->execution = run->connections.started;
    task->sent = run->sent;
    task->wire = run->wire;
    task->ended = ended;
    task->arg = arg;
    task->awaited = -1;
    fifo_put(&run->executor.tasks, task, next);
    advance(run, task);
}

static int is_over(struct executor_context *run, void *task)
{
    (void)run;
    return ((const struct task *)task)->is_over;
}

bhvd_status task_execute(struct executor_context *run, struct task *task)
{
    task_start(run, task, NULL, NULL);
    bhvd_status status = run_until(run, is_over, task, -1);
    end(run, task, status);
    return status;
}

// ----------------------------------------------------------------------------------------------------------- all of them

bool tasks_advance(struct executor_context *run)
{
    bool progress = false;
    for (struct task *task = run->executor.tasks.head, *next; task && !run->failure.status; task = next) {
        progress |= advance(run, task);
        next = task->next;
        if (task->is_over && task->ended && !run->failure.status) {
            end(run, task, BHVD_OK);
            progress = true;
        }
    }
    return progress;
}

bool tasks_can_advance(struct executor_context *run)
{
    struct task *task = run->executor.tasks.head;
    while (task && !task->can_advance(run, task))
        task = task->next;
    return task;
}

void tasks_abort(struct executor_context *run)
{
    for (struct task *task = run->executor.tasks.head, *next; task; task = next) {
        next = task->next;
        if (task->ended)
            end(run, task, run->failure.status);
    }
}

bool tasks_have_state(const struct executor_context *run, const void *state)
{
    const struct task *task = run->executor.tasks.head;
    while (task && !(state && task->state == state))
        task = task->next;
    return task;
}

int tasks_await(const struct executor_context *run)
{
    const struct task *task = run->executor.tasks.head;
    while (task && task->awaited < 0)
        task = task->next;
    return task ? task->awaited : -1;
}
