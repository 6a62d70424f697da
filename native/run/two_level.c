#include "run/two_level.h"

#include <stdlib.h>

struct inter_host {
    struct plan plan;
    struct task *running;               // NULL: none, or over
};

static struct inter_host *inter_host_of(const struct two_level *l, size_t piece) { return &l->inter_hosts[piece % l->depth]; }

static void start_inter_host(struct run *run, struct two_level *l)
{
    struct inter_host *inter_host = inter_host_of(l, l->begun);
    struct plan *plan = &inter_host->plan;
    const bhvd_status status = l->ops->inter_exchange(run, l, l->begun++, plan);
    if (status || !plan->made)
        return;
    plan->operands.execution = l->task.execution;
    plan_start(run, plan, NULL, NULL, &inter_host->running);
}

// The stage is over, or the run has failed.
static void end_inter_host(struct run *run, struct inter_host *inter_host)
{
    if (inter_host->running)
        task_drop(run, inter_host->running);
    inter_host->running = NULL;
    plan_fini(run, &inter_host->plan);
}

static bool begins_next(const struct two_level *l) { return l->begun < l->count && l->begun < l->ended + l->depth; }

static bool exchange_is_over(const struct two_level *l)
{
    const struct task *running = l->ended < l->begun ? inter_host_of(l, l->ended)->running : NULL;
    return l->ended < l->begun && (!running || running->is_over);
}

// Pipelines of one lane run one after the other, those of an earlier execution first: tasks take a free lane in this order because
// they are advanced in it.
static bool may_take_lane(const struct two_level *l) { return !l->local->users[l->lane] || l->local->users[l->lane] == l; }

static void leave_lane(struct two_level *l)
{
    if (l->local->users[l->lane] == l)
        l->local->users[l->lane] = NULL;
}

static void end_piece(struct run *run, struct two_level *l)
{
    if (l->ops->end)
        l->ops->end(run, l, l->ended);
    l->ended++;
}

static void end_pipeline(struct run *run, struct two_level *l)
{
    pipeline_end(run, l->pipeline);
    l->pipeline = NULL;
    if (l->is_reducing)
        start_inter_host(run, l);
    else
        end_piece(run, l);
}

// Is there work other than a pipeline's step?
static bool may_begin_stage(const struct two_level *l)
{
    if (begins_next(l))
        return !l->ops->reduce || may_take_lane(l);
    return exchange_is_over(l) && (!l->ops->distribute || may_take_lane(l));
}

static void begin_stage(struct run *run, struct two_level *l)
{
    l->is_reducing = begins_next(l);
    if (l->is_reducing) {
        if (l->ops->reduce)
            l->pipeline = l->ops->reduce(run, l, l->begun);
        else
            start_inter_host(run, l);
        return;
    }
    end_inter_host(run, inter_host_of(l, l->ended));
    if (l->ops->distribute)
        l->pipeline = l->ops->distribute(run, l, l->ended);
    else
        end_piece(run, l);
}

static bool advance_pieces(struct run *run, struct two_level *l)
{
    struct task *task = &l->task;
    const size_t step = l->nbytes < HOST_STAGING_BUFFER_BYTES ? l->nbytes : HOST_STAGING_BUFFER_BYTES;
    bool progress = false;
    task->awaited = -1;
    if (may_take_lane(l))
        l->local->users[l->lane] = l;
    for (size_t nbytes = 0; l->ended < l->count && nbytes < LOCAL_BYTES && !run->failure.status; progress = true) {
        if (!l->pipeline) {
            if (!may_begin_stage(l))
                break;
            begin_stage(run, l);
        } else if (pipeline_is_over(l->pipeline)) {
            end_pipeline(run, l);
        } else if (pipeline_advance(run, l->pipeline)) {
            nbytes += step;
        } else {
            task->awaited = l->local->ranks[l->pipeline->slowest];
            pipeline_can_advance(run, l->pipeline);     // has the awaited member left?
            break;
        }
        run->messages_moved++;
    }
    task->is_over = l->ended == l->count && !run->failure.status;
    if (task->is_over)
        leave_lane(l);
    return progress;
}

// Counts bytes for the task's own execution.
static bool advance(struct run *run, struct task *task)
{
    struct two_level *l = (struct two_level *)task;
    const struct wire wire_before = run->wire;
    struct sent *sent_before = run->sent;
    run->wire = l->wire;
    run->sent = l->sent;
    const bool progress = advance_pieces(run, l);
    run->wire = wire_before;
    run->sent = sent_before;
    return progress;
}

static bool can_advance(struct run *run, struct task *task)
{
    struct two_level *l = (struct two_level *)task;
    if (l->pipeline)
        return pipeline_is_over(l->pipeline) || pipeline_can_advance(run, l->pipeline);
    return task->is_over || may_begin_stage(l);
}

static void destroy(struct run *run, struct task *task)
{
    struct two_level *l = (struct two_level *)task;
    leave_lane(l);
    for (size_t i = 0; i < l->depth; i++)
        end_inter_host(run, &l->inter_hosts[i]);
    buffer_pool_release(&run->buffers, &l->memory);
    span_list_fini(&l->list);
    free(l->part);
    free(l->inter_hosts);
    free(l);
}

void *two_level_create(struct run *run, size_t size, const struct two_level_ops *ops, struct group *local,
                       size_t nbytes, size_t count, size_t most)
{
    const size_t depth = count < most ? count : most;
    struct two_level *l = calloc(1, size);
    struct inter_host *inter_hosts = calloc(depth + 1, sizeof *inter_hosts);
    if (!l || !inter_hosts) {
        free(l);
        free(inter_hosts);
        run_fail(run, BHVD_ERR_SYSTEM, "no memory for an operation of %zu bytes", nbytes);
        return NULL;
    }
    *l = (struct two_level){
        .task = {.execution = run->connections.started, .advance = advance, .can_advance = can_advance, .destroy = destroy},
        .sent = run->sent, .wire = run->wire,
        .ops = ops, .local = local, .lane = 1 + (int)(run->connections.started % (HOST_LANES - 1)),
        .nbytes = nbytes, .count = count, .depth = depth, .inter_hosts = inter_hosts,
    };
    return l;
}

bhvd_status two_level_plan(struct run *run, struct two_level *l, bool is_complete, struct plan *plan)
{
    if (!is_complete) {
        const size_t nbytes = l->nbytes;
        destroy(run, &l->task);
        return run_fail(run, BHVD_ERR_SYSTEM, "no memory for the pieces of %zu bytes", nbytes);
    }
    plan->made = true;
    plan->task = &l->task;
    return BHVD_OK;
}
