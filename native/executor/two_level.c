#include "executor/two_level.h"

#include <stdlib.h>

struct inter_host {
    struct plan plan;
    struct task *running;               // NULL: none, or over
};

static struct inter_host *inter_host_of(const struct two_level *l, size_t piece) { return &l->inter_hosts[piece % l->depth]; }

static void start_inter_host(struct executor *exec, struct two_level *l)
{
    struct inter_host *inter_host = inter_host_of(l, l->begun);
    struct plan *plan = &inter_host->plan;
    const bhvd_status status = l->ops->inter_exchange(exec, l, l->begun++, plan);
    if (status || !plan->is_planned)
        return;
    plan->operands.execution = l->task.execution;
    plan_start(exec, plan, NULL, NULL, &inter_host->running);
}

// The stage is over, or the executor has failed.
static void end_inter_host(struct executor *exec, struct inter_host *inter_host)
{
    if (inter_host->running)
        task_destroy(exec, inter_host->running);
    inter_host->running = NULL;
    plan_fini(exec, &inter_host->plan);
}

static bool begins_next(const struct two_level *l) { return l->begun < l->count && l->begun < l->ended + l->depth; }

static bool exchange_is_complete(const struct two_level *l)
{
    const struct task *running = l->ended < l->begun ? inter_host_of(l, l->ended)->running : NULL;
    return l->ended < l->begun && (!running || running->is_complete);
}

// Pipelines of one slot run one after the other, those of an earlier execution first: tasks take a free slot in
// this order because they are advanced in it.
static bool may_take_slot(const struct two_level *l) { return !l->local->users[l->slot] || l->local->users[l->slot] == l; }

static void leave_slot(struct two_level *l)
{
    if (l->local->users[l->slot] == l)
        l->local->users[l->slot] = NULL;
}

static void end_piece(struct executor *exec, struct two_level *l)
{
    if (l->ops->end)
        l->ops->end(exec, l, l->ended);
    l->ended++;
}

static void end_pipeline(struct executor *exec, struct two_level *l)
{
    pipeline_end(exec, l->pipeline);
    l->pipeline = NULL;
    if (l->is_reducing)
        start_inter_host(exec, l);
    else
        end_piece(exec, l);
}

// Is there work other than a pipeline's step?
static bool may_begin_stage(const struct two_level *l)
{
    if (begins_next(l))
        return !l->ops->reduce || may_take_slot(l);
    return exchange_is_complete(l) && (!l->ops->distribute || may_take_slot(l));
}

static void begin_stage(struct executor *exec, struct two_level *l)
{
    l->is_reducing = begins_next(l);
    if (l->is_reducing) {
        if (l->ops->reduce)
            l->pipeline = l->ops->reduce(exec, l, l->begun);
        else
            start_inter_host(exec, l);
        return;
    }
    end_inter_host(exec, inter_host_of(l, l->ended));
    if (l->ops->distribute)
        l->pipeline = l->ops->distribute(exec, l, l->ended);
    else
        end_piece(exec, l);
}

static bool advance_pieces(struct executor *exec, struct two_level *l)
{
    struct task *task = &l->task;
    const size_t step = l->nbytes < SHM_BUFFER_BYTES ? l->nbytes : SHM_BUFFER_BYTES;
    bool progress = false;
    task->awaited = -1;
    if (may_take_slot(l))
        l->local->users[l->slot] = l;
    for (size_t nbytes = 0; l->ended < l->count && nbytes < LOCAL_BYTES && !exec->failure.status; progress = true) {
        if (!l->pipeline) {
            if (!may_begin_stage(l))
                break;
            begin_stage(exec, l);
        } else if (pipeline_is_complete(l->pipeline)) {
            end_pipeline(exec, l);
        } else if (pipeline_advance(exec, l->pipeline)) {
            nbytes += step;
        } else {
            task->awaited = l->local->ranks[l->pipeline->slowest];
            pipeline_can_advance(exec, l->pipeline);    // has the awaited member left?
            break;
        }
        exec->messages_moved++;
    }
    task->is_complete = l->ended == l->count && !exec->failure.status;
    if (task->is_complete)
        leave_slot(l);
    return progress;
}

// The steps of a task choose by the network cost of its execution, and count their bytes for it.
static bool advance(struct executor *exec, struct task *task)
{
    struct two_level *l = (struct two_level *)task;
    const struct network_cost network_before = exec->network;
    struct bhvd_sent *sent_before = exec->sent;
    exec->network = l->network;
    exec->sent = l->sent;
    const bool progress = advance_pieces(exec, l);
    exec->network = network_before;
    exec->sent = sent_before;
    return progress;
}

static bool can_advance(struct executor *exec, struct task *task)
{
    struct two_level *l = (struct two_level *)task;
    if (l->pipeline)
        return pipeline_is_complete(l->pipeline) || pipeline_can_advance(exec, l->pipeline);
    return task->is_complete || may_begin_stage(l);
}

static void destroy(struct executor *exec, struct task *task)
{
    struct two_level *l = (struct two_level *)task;
    leave_slot(l);
    for (size_t i = 0; i < l->depth; i++)
        end_inter_host(exec, &l->inter_hosts[i]);
    executor_release(exec, l->memory);
    span_list_fini(&l->list);
    free(l->part);
    free(l->inter_hosts);
    free(l);
}

void *two_level_create(struct executor *exec, size_t size, const struct two_level_ops *ops, struct group *local,
                       size_t nbytes, size_t count, size_t most)
{
    const size_t depth = count < most ? count : most;
    struct two_level *l = calloc(1, size);
    struct inter_host *inter_hosts = calloc(depth + 1, sizeof *inter_hosts);
    if (!l || !inter_hosts) {
        free(l);
        free(inter_hosts);
        executor_fail(exec, BHVD_ERR_SYSTEM, "no memory for an operation of %zu bytes", nbytes);
        return NULL;
    }
    *l = (struct two_level){
        .task = {.execution = exec->connections.started, .advance = advance, .can_advance = can_advance, .destroy = destroy},
        .sent = exec->sent, .network = exec->network,
        .ops = ops, .local = local, .slot = 1 + (int)(exec->connections.started % (SHM_SLOTS - 1)),
        .nbytes = nbytes, .count = count, .depth = depth, .inter_hosts = inter_hosts,
    };
    return l;
}

bhvd_status two_level_plan(struct executor *exec, struct two_level *l, bool has_memory, struct plan *plan)
{
    if (!has_memory) {
        const size_t nbytes = l->nbytes;
        destroy(exec, &l->task);
        return executor_fail(exec, BHVD_ERR_SYSTEM, "no memory for the pieces of %zu bytes", nbytes);
    }
    plan->is_planned = true;
    plan->task = &l->task;
    return BHVD_OK;
}
