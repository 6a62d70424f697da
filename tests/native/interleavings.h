// The negotiation of a few ranks in every possible order of actions: three tensors each, posted in different orders, then a
// join, then the shutdown; some ranks join before they have posted all, or leave while others need them. No order may leave an
// operation waiting (a deadlock), and all ranks must execute in the same order. The same in a tree of relays, here a chain;
// when a relay leaves, the remaining ranks must not be affected.
//
// The ranks are contexts without threads. An action is an engine turn of a rank (engine_poll: it sends requests, reads messages,
// responds), optionally preceded by the program's next step. Executions end immediately: the test is about messages and their
// order. The search is depth first, and visits no state twice. Contexts cannot be copied, so a state is restored by repeating
// the actions that lead to it.
#pragma once

#include "check.h"

#include "core/api/api.h"
#include "core/context/context.h"
#include "core/context/operation.h"
#include "core/engine/engine.h"
#include "core/message/frame.h"
#include "core/negotiation/coordinator.h"
#include "core/negotiation/departure.h"
#include "core/negotiation/relay.h"
#include "transport/shm_segment.h"

enum { RANKS_MAX = 4, TENSORS = 3, STEPS = TENSORS + 2, DEPTH_MAX = 128, SEEN = 1 << 20 };

// The number of tensors that each rank posts before it joins; -1 - n: it posts n and leaves without a join.
struct scenario {
    int posts[RANKS_MAX];
    int ranks;                          // 0: three
    int fanout;                         // 1: a chain, each rank relays for the next; 0: a star
    bool ends_only;                     // the tensors use the process set of the first and the last rank; no joins
};

struct rank {
    bhvd_context *ctx;
    int step;
    bool leaving, departed;
    bhvd_handle *handles[STEPS];
    int handle_count;
    char order[4 * RANKS_MAX];              // its executions, by first letters
    size_t executed;
};

static const struct scenario *scenario;
static int rank_count;
static struct rank ranks[RANKS_MAX];
static void *world;
static uint64_t *seen;
static size_t state_count, end_count;

static bool leaves_early(int r) { return scenario->posts[r] < 0; }

static int posts_of(int r) { return leaves_early(r) ? -1 - scenario->posts[r] : scenario->posts[r]; }

static bool joins(int r) { return !leaves_early(r) && !scenario->ends_only; }

// Like bhvd_context_create, but without the progress thread.
static bhvd_context *make_context(int rank)
{
    struct bhvd_error error;
    const struct bhvd_context_options options = {.rank = rank, .size = rank_count, .transport = "inproc",
                                                 .inproc_world = world, .cache_capacity = 4, .timeout_ms = 1000,
                                                 .negotiation = scenario->fanout ? "tree" : "star", .negotiation_fanout = scenario->fanout};
    bhvd_context *ctx;
    CHECK_STATUS(context_new(&options, &ctx, &error), BHVD_OK);
    const int32_t all[] = {0, 1, 2, 3}, ends[] = {0, rank_count - 1};
    int id;
    CHECK_STATUS(connections_init(&ctx->exec.connections, &ctx->options, NULL, &error), BHVD_OK);
    CHECK_STATUS(context_prepare(ctx), BHVD_OK);
    CHECK_STATUS(process_set_add(&ctx->sets, &ctx->exec, all, rank_count, false, &id, &error), BHVD_OK);
    if (scenario->ends_only)
        CHECK_STATUS(process_set_add(&ctx->sets, &ctx->exec, ends, 2, false, &id, &error), BHVD_OK);
    return ctx;
}

static void begin(void)
{
    for (int r = 0; r < rank_count; r++)
        ranks[r] = (struct rank){.ctx = make_context(r)};
    for (int from = 0; from < rank_count; from++) {
        for (int to = 0; to < rank_count; to++) {
            struct ring *ring = shm_segment_control_ring(&ranks[0].ctx->exec.connections.shm, from, to);
            atomic_store(&ring->head, 0);
            atomic_store(&ring->tail, 0);
        }
    }
}

static void end(void)
{
    for (int r = 0; r < rank_count; r++) {
        executor_fail(&ranks[r].ctx->exec, BHVD_ERR_SHUTDOWN, "the end of the test");
        for (int i = 0; i < ranks[r].handle_count; i++)
            bhvd_handle_drop(ranks[r].handles[i]);
        bhvd_context_destroy(ranks[r].ctx);
    }
}

static void post(struct rank *rank, bhvd_kind kind, const char *name)
{
    static float values[RANKS_MAX][TENSORS];
    const int64_t one = 1;
    int r = (int)(rank - ranks);
    struct bhvd_tensor tensor = {.src = &values[r][name[0] % TENSORS], .dst = &values[r][name[0] % TENSORS],
                                 .shape = &one, .ndim = 1, .dtype = BHVD_FLOAT32};
    struct bhvd_args args = {.kind = kind, .name = name, .tensors = &tensor, .tensor_count = kind == BHVD_ALLREDUCE,
                             .op = BHVD_OP_SUM, .prescale_factor = 1.0, .postscale_factor = 1.0, .device = -1,
                             .blocking = 1, .process_set = scenario->ends_only};
    struct bhvd_error error;
    // Rejected, because another rank has left and this one knows it.
    if (bhvd_post(rank->ctx, &args, &rank->handles[rank->handle_count], &error) == BHVD_OK)
        rank->handle_count++;
    else
        CHECK_STATUS(error.status, BHVD_ERR_SHUTDOWN);
}

static bool all_done(const struct rank *rank)
{
    for (int i = 0; i < rank->handle_count; i++) {
        if (!bhvd_poll(rank->handles[i]))
            return false;
    }
    return true;
}

// The program: posts its tensors, joins, and shuts down when all is done, or immediately if it leaves early.
static bool can_step(int r)
{
    struct rank *rank = &ranks[r];
    bool ends = rank->step >= posts_of(r) + joins(r);
    return !rank->leaving && (!ends || leaves_early(r) || all_done(rank));
}

// Like progress_stop.
static void leave_when_free(struct rank *rank)
{
    if (!rank->leaving || rank->departed || !departure_is_free(rank->ctx))
        return;
    rank->departed = true;
    executor_fail(&rank->ctx->exec, BHVD_ERR_SHUTDOWN, "Horovod has been shut down. (this rank left the job)");
    departure_send_goodbye(rank->ctx);
}

static void take_step(int r)
{
    static const char *const names[TENSORS] = {"a", "b", "c"};
    struct rank *rank = &ranks[r];
    int step = rank->step++, posts = posts_of(r);
    if (step < posts) {
        post(rank, BHVD_ALLREDUCE, names[(step + r) % TENSORS]);
    } else if (step == posts && joins(r)) {
        post(rank, BHVD_JOIN, "join");
    } else {
        rank->leaving = true;
        CHECK_STATUS(departure_begin(rank->ctx), BHVD_OK);
        leave_when_free(rank);
    }
}

// Executes agreed operations in the order of the responses; an execution takes no time.
static void execute_all(struct rank *rank)
{
    bhvd_context *ctx = rank->ctx;
    for (struct execution *e; (e = fifo_take(&ctx->executions, next));) {
        for (int i = 0; i < e->count; i++) {
            struct bhvd_operation *op = operation_of(e->colls[i]);
            CHECK(rank->executed < sizeof rank->order - 1);
            if (!op->coll.is_proxy)
                rank->order[rank->executed++] = op->coll.args.name[0];
            if (op->coll.args.kind == BHVD_JOIN)
                op->value = op->response_numbers[0];
            operation_complete(op, NULL);
        }
        free(e);
    }
}

static void act(int action)
{
    int r = action % rank_count;
    if (action >= rank_count)
        take_step(r);
    if (!ranks[r].departed) {
        engine_poll(ranks[r].ctx, true);
        execute_all(&ranks[r]);
        leave_when_free(&ranks[r]);
    }
}

// ----------------------------------------------------------------------------------------------------------- states

static void mix(uint64_t *hash, const void *data, size_t size)
{
    for (size_t i = 0; i < size; i++)
        *hash = (*hash ^ ((const unsigned char *)data)[i]) * 0x100000001b3u;
}

static void mix_number(uint64_t *hash, uint64_t number) { mix(hash, &number, sizeof number); }

static uint64_t mix_pending(const struct pending *pending)
{
    uint64_t sum = 0;
    mix(&sum, pending->key.name, pending->key.name_size);
    for (int i = 0; i < pending->size; i++)
        mix_number(&sum, pending->requests[i] != NULL);
    mix_number(&sum, (uint64_t)pending->first);
    return sum;
}

static void mix_relay(uint64_t *hash, struct relay *relay)
{
    mix_number(hash, relay->closing_by_ns != 0);
    mix(hash, bundle_write(&relay->bundle)->data, relay->bundle.out.size);
    for (int i = 0; i < relay->tree.child_count; i++)
        CHECK(relay->tree.children[i].out.size == 0);
}

static uint64_t state_hash(void)
{
    uint64_t hash = 0xcbf29ce484222325u;
    for (int r = 0; r < rank_count; r++) {
        const struct rank *rank = &ranks[r];
        mix_number(&hash, (uint64_t)rank->step << 32 | (uint64_t)rank->leaving << 1 | rank->departed);
        mix_relay(&hash, rank->ctx->relay);
        mix(&hash, rank->order, rank->executed);
        for (int i = 0; i < rank->handle_count; i++) {
            struct bhvd_error error;
            mix_number(&hash, bhvd_poll(rank->handles[i]) ? bhvd_wait(rank->handles[i], 0, &error) : 100);
            mix_number(&hash, rank->handles[i]->phase);
        }
        mix_number(&hash, rank->ctx->closing.status << 8 | rank->ctx->exec.failure.status);
        for (int peer = 0; peer < rank_count; peer++) {
            struct ring *ring = shm_segment_control_ring(&rank->ctx->exec.connections.shm, r, peer);
            uint64_t head = atomic_load(&ring->head), tail = atomic_load(&ring->tail);
            mix_number(&hash, tail - head);
            mix(&hash, ring->data + head, tail - head);     // never wraps: it is far larger than all messages together
            mix_number(&hash, peer == r ? 0 : rank->ctx->exec.connections.links[peer].state);
        }
    }
    struct coordinator *c = ranks[COORDINATOR].ctx->coordinator;
    uint64_t pending = 0;
    for (const struct pending *each = NULL; (each = pending_next(&c->pending, each));)
        pending += mix_pending(each);   // in any order, since the table has none
    mix_number(&hash, pending);
    for (int r = 0; r < rank_count; r++)
        mix(&hash, (int[]){c->requesters[r].joined, c->requesters[r].departed}, 2 * sizeof(int));
    mix_number(&hash, (uint64_t)c->last_joined);
    return hash | 1;
}

// Adds the state; returns whether it is new.
static bool enter_state(void)
{
    uint64_t hash = state_hash();
    size_t at = (hash >> 1) % SEEN;
    while (seen[at] && seen[at] != hash)
        at = (at + 1) % SEEN;
    if (seen[at] == hash)
        return false;
    seen[at] = hash;
    CHECK(++state_count < SEEN / 2);
    return true;
}

// ---------------------------------------------------------------------------------------------------------- invariants

static const char *schedule(const int *actions, int depth)
{
    static char text[8 * DEPTH_MAX];
    size_t length = 0;
    for (int i = 0; i < depth; i++)
        length += (size_t)snprintf(text + length, sizeof text - length, "%s%d ", actions[i] >= rank_count ? "step" : "turn",
                                   actions[i] % rank_count);
    return text;
}

// An operation that one rank has executed has been executed by all ranks that posted it.
static void check_together(const int *actions, int depth)
{
    for (int i = 0; i < rank_count * STEPS * rank_count; i++) {
        const struct rank *one = &ranks[i % rank_count], *other = &ranks[i / rank_count % rank_count];
        const int at = i / rank_count / rank_count;
        struct bhvd_error error;
        if (at >= one->handle_count || bhvd_wait(one->handles[at], 0, &error))
            continue;
        for (int j = 0; j < other->handle_count; j++) {
            if (other->handles[j]->coll.args.name[0] == one->handles[at]->coll.args.name[0] &&
                bhvd_wait(other->handles[j], 0, &error))
                check_fail(__FILE__, __LINE__, "rank %d executes '%c', rank %d has not, after: %s", i % rank_count,
                           one->handles[at]->coll.args.name[0], i / rank_count % rank_count, schedule(actions, depth));
        }
    }
}

// No rank can act any more.
static void check_end(const int *actions, int depth)
{
    bool somebody_left_early = false;
    end_count++;
    for (int r = 0; r < rank_count; r++)
        somebody_left_early |= leaves_early(r) && !scenario->ends_only;
    for (int r = 0; r < rank_count; r++) {
        const struct rank *rank = &ranks[r];
        if (!all_done(rank) || !rank->departed)
            check_fail(__FILE__, __LINE__, "rank %d waits for ever after: %s", r, schedule(actions, depth));
        for (int i = 0; i < rank->handle_count; i++) {
            struct bhvd_error error;
            bhvd_status status = bhvd_wait(rank->handles[i], 0, &error);
            if (status && !(somebody_left_early && status == BHVD_ERR_SHUTDOWN))
                check_fail(__FILE__, __LINE__, "rank %d ends with \"%s\" after: %s", r, error.message,
                           schedule(actions, depth));
            if (!status && rank->handles[i]->coll.args.kind == BHVD_JOIN)
                CHECK_EQ(rank->handles[i]->value, ranks[0].handles[ranks[0].handle_count - 1]->value);
        }
    }
    check_together(actions, depth);
    // Two ranks execute any two common tensors in the same order.
    for (int r = 1; r < rank_count; r++) {
        const char *last = ranks[0].order;
        for (const char *name = ranks[0].order; *name; name++) {
            const char *at = strchr(ranks[r].order, *name);
            if (!at)
                continue;
            const char *previous = last == ranks[0].order ? ranks[r].order : last;
            if (at < previous)
                check_fail(__FILE__, __LINE__, "rank 0 executes %s, rank %d %s, after: %s", ranks[0].order, r,
                           ranks[r].order, schedule(actions, depth));
            last = at;
        }
    }
}

// Explores all continuations of these actions. The contexts are in that state at the call, and in any state at the return.
static void explore(int *actions, int depth)
{
    bool is_end = true, is_here = true;
    CHECK(depth < DEPTH_MAX);
    uint64_t here = state_hash();
    for (int action = 0; action < 2 * rank_count; action++) {
        if (!is_here) {
            end();
            begin();
            for (int i = 0; i < depth; i++)
                act(actions[i]);
            is_here = true;
            CHECK(state_hash() == here);        // the actions are deterministic
        }
        if (action >= rank_count ? !can_step(action - rank_count) : ranks[action].departed)
            continue;
        actions[depth] = action;
        act(action);
        if (state_hash() == here)
            continue;                           // the turn had no effect
        is_end = is_here = false;
        if (enter_state())
            explore(actions, depth + 1);
    }
    if (is_end)
        check_end(actions, depth);
}

static void explore_all(struct scenario which)
{
    int actions[DEPTH_MAX];
    scenario = &which;
    rank_count = which.ranks ? which.ranks : 3;
    world = bhvd_inproc_world_create(rank_count);
    seen = calloc(SEEN, sizeof *seen);
    state_count = end_count = 0;
    begin();
    enter_state();
    explore(actions, 0);
    end();
    printf(" %zu states, %zu ends", state_count, end_count);
    CHECK(state_count > 50 && end_count > 0);
    free(seen);
    bhvd_inproc_world_destroy(world);
}
