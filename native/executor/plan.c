#include "executor/plan.h"

#include "executor/tasks.h"

struct schedule *plan_begin(struct plan *plan, const struct group *group)
{
    plan->is_planned = true;
    plan->group = group;
    schedule_init(&plan->schedule, group->size, group->rank);
    return &plan->schedule;
}

bhvd_status plan_start(struct executor *exec, struct plan *plan, void (*on_complete)(void *arg, bhvd_status status), void *arg)
{
    struct task *task = task_create(exec, plan->group, &plan->schedule, &plan->operands);
    if (!task)
        return exec->failure.status;
    task_start(exec, task, on_complete, arg);
    return BHVD_OK;
}

bhvd_status plan_execute(struct executor *exec, struct plan *plan)
{
    struct task *task = task_create(exec, plan->group, &plan->schedule, &plan->operands);
    bhvd_status status = task ? task_execute(exec, task) : exec->failure.status;
    plan_fini(plan);
    return status;
}

void plan_fini(struct plan *plan)
{
    schedule_fini(&plan->schedule);
    span_list_fini(&plan->list);
    if (plan->release)
        plan->release(plan->operands.arg);
    *plan = (struct plan){0};
}
