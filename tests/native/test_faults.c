// Faults in virtual time: ranks on a network with delays and cuts, stopped or killed processes, and programs that hang or leave
// early, all drawn from a schedule number.
//
//     harmless     every fault is shorter than the shortest limit: each operation ends with the correct result
//     otherwise    each operation ends within the limits: correctly, or with an error that blames a faulty rank
//
// BHVD_SCHEDULES: how many (default: below); BHVD_SCHEDULE: run only this one, and print each step.
#include <math.h>

#include "core/negotiation/relay.h"
#include "virtual_network.h"

enum {
    SCHEDULES = 3000,
    OPERATIONS_MAX = 10, VALUES_MAX = 4096,
    HEARTBEAT_MS = 10000, TIMEOUT_MS = 20000, STALL_MS = 25000,
    WORD_MS = 6000,                 // a few times the longest delay
    HARMLESS_MS = 5000,             // a third of the heartbeats' limit is left for packets in flight, and for reading them late
    HORIZON_MS = 400000
};

static uint64_t current;            // the number of the schedule
static bool told;                   // whether steps are printed

#define FAIL(format, ...) check_fail(__FILE__, __LINE__, "BHVD_SCHEDULE=%llu: " format, (unsigned long long)current, __VA_ARGS__)

// -------------------------------------------------------------------------------------------------------- schedules

enum { SETS = 3 };

static const char *const FAULT_NAMES[] = {"stop", "hang", "kill", "cut", "cut of a pair", "leave"};

struct operation {
    bhvd_kind kind;
    char name[8];
    int count, root;
    int set;                        // 0: all ranks; 1: some; 2: some, added and removed by operations
};

// The schedule drawn from a number; its faults and delays are the network's.
struct schedule_of_faults {
    int fanout, operations;
    const char *path;
    struct operation list[OPERATIONS_MAX + 1];          // the last one stays empty
    int posts[RANKS_MAX];           // operations that a rank posts before it joins; all of them without joins
    bool joins;
    int32_t members[SETS][RANKS_MAX];
    int sizes[SETS];
    int cache;                      // capacity in responses
};

static struct schedule_of_faults now_drawn;
static const struct schedule_of_faults *const S = &now_drawn;

static int64_t draw_length_ns(void) { return (int64_t)(one_in(4) ? draw(40000) : draw(HARMLESS_MS / 2)) * MS; }

static void draw_faults(void)
{
    network.fault_count = one_in(5) ? 0 : 1 + one_in(3);
    for (int i = 0; i < network.fault_count; i++) {
        struct fault *f = &network.faults[i];
        f->kind = draw(FAULT_KINDS);
        f->rank = (int)draw((uint64_t)network.size);
        f->begin_ns = (int64_t)draw(3000) * MS;
        f->other = (f->rank + 1 + (int)draw((uint64_t)network.size - 1)) % network.size;
        f->end_ns = f->kind == KILL || f->kind == LEAVE || one_in(6) ? NEVER : f->begin_ns + draw_length_ns();
    }
}

// Ranks in fewer sets must not finish while others need the coordinator: only pairwise averages follow the last operation of all
// ranks.
static void end_together(void)
{
    for (int i = now_drawn.operations - 1; i >= 0; i--) {
        struct operation *op = &now_drawn.list[i];
        if (op->set == 0 && op->kind == BHVD_D_FP_S)
            continue;
        if (op->set) {
            op->set = 0;
            op->kind = BHVD_ALLREDUCE;
            op->name[0] = 'r';
            op->count = op->name[1] == '3' ? VALUES_MAX : 1 + 37 * (op->name[1] - '0');
        }
        return;
    }
}

static void draw_all(uint64_t number)
{
    static const char *const paths[] = {"", "ring", "doubling", "halving"};
    struct schedule_of_faults *s = &now_drawn;
    random_state = number * 0x2545f4914f6cdd1du;
    memset(s, 0, sizeof *s);
    network = (struct network){.varies = true};
    network.size = 2 + (int)draw(RANKS_MAX - 1);
    s->fanout = one_in(2) ? 0 : 1 + (int)draw(2);
    s->operations = 1 + (int)draw(OPERATIONS_MAX);
    s->path = paths[draw(4)];
    s->joins = one_in(4);
    s->cache = one_in(3) ? (int)draw(3) : 16;
    network.room = one_in(3) ? 512 + draw(4096) : 1 << 16;
    const int first = one_in(3) ? 1 + (int)draw((uint64_t)network.size - 1) : 0;
    for (int rank = 0; rank < network.size; rank++) {
        network.host_of[rank] = first ? rank >= first : rank;
        s->members[0][s->sizes[0]++] = rank;
        for (int set = 1; set < SETS; set++)
            if (one_in(2) || s->sizes[set] + network.size - rank <= 2)
                s->members[set][s->sizes[set]++] = rank;
    }
    for (int set = 1; set < SETS; set++)
        if (network.host_of[s->members[set][0]] == network.host_of[s->members[set][s->sizes[set] - 1]])
            s->sizes[set] = network.size;       // no such set: on one host operations run to completion, and so does a removal
    const bool adds = !first && !s->joins && one_in(3) && s->sizes[2] < network.size &&
                      (s->sizes[1] != s->sizes[2] || memcmp(s->members[1], s->members[2], (size_t)s->sizes[1] * sizeof(int32_t)));
    const int added = adds ? (int)draw((uint64_t)s->operations) : s->operations, removed = added + 1 + (int)draw(OPERATIONS_MAX);
    const int names = 1 + (int)draw(4);         // fewer than operations: later ones use a cached id
    for (int i = 0; i < s->operations; i++) {
        struct operation *op = &s->list[i];
        static const bhvd_kind kinds[] = {BHVD_ALLREDUCE, BHVD_ALLREDUCE, BHVD_D_FP_S, BHVD_C_LP_S,
                                          BHVD_REDUCESCATTER, BHVD_ALLTOALL, BHVD_BROADCAST, BHVD_ALLGATHER};
        const int kind = s->joins ? 0 : (int)draw(sizeof kinds / sizeof kinds[0]), name = (int)draw((uint64_t)names);
        const int sets[] = {0, s->sizes[1] < network.size, i > added && i < removed ? 2 : 0};
        *op = (struct operation){.kind = kinds[kind], .set = s->joins ? 0 : sets[draw(SETS)],
                                 .count = name == 3 ? VALUES_MAX : 1 + 37 * name};
        op->count -= op->kind == BHVD_D_FP_S && one_in(8);      // changes the arguments of a pairwise operation
        op->root = s->members[op->set][name % s->sizes[op->set]];
        snprintf(op->name, sizeof op->name, "%c%d", "rrncsabg"[kind], name);
        if (i == added || i == removed)
            *op = (struct operation){.kind = i == added ? BHVD_PROCESS_SET_ADD : BHVD_PROCESS_SET_REMOVE, .name = "set"};
    }
    end_together();
    const int64_t far_ns = 1 + (int64_t)draw(40) * MS;
    for (int from = 0; from < network.size; from++) {
        s->posts[from] = s->joins ? (int)draw((uint64_t)s->operations + 1) : s->operations;
        for (int to = 0; to < from; to++)
            network.delay_ns[from][to] = network.delay_ns[to][from] = 10000 + (int64_t)draw((uint64_t)far_ns);
    }
    draw_faults();
}

// ---------------------------------------------------------------------------------------------------------- programs

// How far a rank's program is.
struct progress {
    bool gives_up;                  // after an error
    int64_t next_ns;                // when the computation before the next operation ends
    int set_ids[SETS];
    int posted, waits_for;          // operations; the one to wait for before the next is posted, -1: none
    bool has_joined;
    bhvd_handle *handles[OPERATIONS_MAX + 1];
    struct bhvd_error errors[OPERATIONS_MAX + 1];
    bool is_done[OPERATIONS_MAX + 1];
    int handle_count, done;
    float src[OPERATIONS_MAX + 1][RANKS_MAX * VALUES_MAX], dst[OPERATIONS_MAX + 1][VALUES_MAX];
};

static struct progress progress[RANKS_MAX];

static float value_of(int rank, int number, int i) { return (float)((rank + 1) * (number + 2) + i % 7); }

// The rank's position in the operation's set; -1: it is no member.
static int position_of(int rank, const struct operation *op)
{
    for (int i = 0; i < S->sizes[op->set]; i++)
        if (S->members[op->set][i] == rank)
            return i;
    return -1;
}

static float expected_of(int rank, int number, int i)
{
    const struct operation *op = &S->list[number];
    const int32_t *members = S->members[op->set];
    const int size = S->sizes[op->set], at = position_of(rank, op);
    float sum = 0;
    if (op->kind == BHVD_BROADCAST)
        return value_of(op->root, number, i);
    if (op->kind == BHVD_ALLGATHER)
        return value_of(members[i / op->count], number, i % op->count);
    if (op->kind == BHVD_ALLTOALL)
        return value_of(members[i / op->count], number, at * op->count + i % op->count);
    if (op->kind == BHVD_D_FP_S)
        return (value_of(rank, number, i) + value_of(members[(at + size - 1) % size], number, i) +
                value_of(members[(at + 1) % size], number, i)) / 3;
    if (op->kind == BHVD_REDUCESCATTER)
        i += at * (op->count / size) + (at < op->count % size ? at : op->count % size);
    for (int member = 0; member < size; member++)
        sum += number < S->posts[members[member]] ? value_of(members[member], number, i) : 0;
    return sum;
}

static bool is_of_sets(const struct operation *op) { return op->kind == BHVD_PROCESS_SET_ADD || op->kind == BHVD_PROCESS_SET_REMOVE; }

// Whether the core allocates the result, since its size differs from the input's.
static bool is_allocated(bhvd_kind kind) { return kind == BHVD_ALLGATHER || kind == BHVD_ALLTOALL || kind == BHVD_REDUCESCATTER; }

static int result_count(int rank, const struct operation *op)
{
    const int size = S->sizes[op->set], at = position_of(rank, op);
    return op->kind == BHVD_ALLGATHER || op->kind == BHVD_ALLTOALL ? op->count * size
           : op->kind == BHVD_REDUCESCATTER                        ? op->count / size + (at < op->count % size)
                                                                   : op->count;
}

static void check_result(int r, int number)
{
    const struct operation *op = &S->list[number];
    const float *values = progress[r].dst[number];
    struct bhvd_result result = {.nbytes = (size_t)op->count * sizeof *values};
    if (is_allocated(op->kind)) {
        CHECK_STATUS(bhvd_result(progress[r].handles[number], 0, &result), BHVD_OK);
        values = result.data;
    }
    CHECK_EQ(result.nbytes / sizeof *values, result_count(r, op));
    for (int i = 0; i < result_count(r, op); i++)
        if (fabsf(values[i] - expected_of(r, number, i)) > 1e-5f * values[i])
            FAIL("rank %d, operation %d (%s): value %d is %g, not %g", r, number, op->name, i, (double)values[i],
                 (double)expected_of(r, number, i));
}

static void post(int r)
{
    struct progress *p = &progress[r];
    const bool is_join = p->posted == S->posts[r];
    const int number = p->posted;
    const struct operation *op = &S->list[number];
    const bool has_tensor = !is_join && !is_of_sets(op), adds = !is_join && op->kind == BHVD_PROCESS_SET_ADD;
    const int64_t shape = op->count * (op->kind == BHVD_ALLTOALL ? S->sizes[op->set] : 1);
    const struct bhvd_tensor tensor = {.shape = &shape, .ndim = 1, .dtype = BHVD_FLOAT32, .src = p->src[number],
                                       .dst = is_allocated(op->kind) ? NULL : p->dst[number]};
    for (int i = 0; has_tensor && i < shape; i++)
        p->src[number][i] = value_of(r, number, i);
    const struct bhvd_args args = {
        .kind = is_join ? BHVD_JOIN : op->kind, .name = is_join ? "join" : op->name, .tensors = &tensor, .tensor_count = has_tensor,
        .op = BHVD_OP_SUM,
        .root_rank = !is_join && op->kind == BHVD_PROCESS_SET_REMOVE ? p->set_ids[2] : has_tensor ? op->root : 0,
        .process_set = is_join ? 0 : p->set_ids[op->set], .topology = BHVD_TOPOLOGY_RING,
        .codec = op->kind == BHVD_C_LP_S ? BHVD_CODEC_FLOAT16 : BHVD_CODEC_NONE,
        .prescale_factor = 1.0, .postscale_factor = 1.0, .device = -1, .splits = adds ? S->members[2] : NULL,
        .split_count = adds ? (size_t)S->sizes[2] : 0};
    const int at = p->handle_count;
    p->has_joined |= is_join;
    p->posted += !is_join;
    const bool is_member = is_join || position_of(r, op) >= 0;
    if (!is_member || bhvd_post(ranks[r].ctx, &args, &p->handles[at], &p->errors[at]) != BHVD_OK) {
        p->handles[at] = NULL;
        p->is_done[at] = true;
        p->done++;
        p->gives_up |= is_member;
    }
    p->handle_count++;
}

static bool name_is_free(const struct progress *p, const struct operation *op)
{
    for (int i = 0; i < p->handle_count && i < p->posted; i++)
        if (!p->is_done[i] && strcmp(S->list[i].name, op->name) == 0 && S->list[i].set == op->set)
            return false;
    return true;
}

static bool has_more(int r)
{
    const struct progress *p = &progress[r];
    return !p->gives_up && (p->posted < S->posts[r] || (S->joins && !p->has_joined));
}

// The next operation is posted after the computation and the operation to wait for; a name is in use once at a time.
static bool may_take_step(int r)
{
    const struct progress *p = &progress[r];
    if (ranks[r].over || ranks[r].leaving || is_under(HANG, r, false) || !has_more(r) || now_ns < p->next_ns ||
        (p->waits_for >= 0 && !p->is_done[p->waits_for]))
        return false;
    if (p->posted == S->posts[r])
        return true;
    const struct operation *next = &S->list[p->posted];
    return next->kind == BHVD_PROCESS_SET_REMOVE ? p->done == p->handle_count : name_is_free(p, next);
}

static void take_step(int r)
{
    struct progress *p = &progress[r];
    post(r);
    const int last = p->handle_count - 1;
    p->waits_for = one_in(2) || (last < p->posted && is_of_sets(&S->list[last])) ? last : -1;
    p->next_ns = now_ns + (one_in(3) ? (int64_t)draw(1500) * MS : one_in(2) ? (int64_t)draw(2000000) : 0);
}

static void collect_ended(int r)
{
    struct progress *p = &progress[r];
    for (int i = 0; i < p->handle_count; i++) {
        if (p->is_done[i] || !bhvd_poll(p->handles[i]))
            continue;
        p->is_done[i] = true;
        p->done++;
        const bhvd_status status = bhvd_wait(p->handles[i], 0, &p->errors[i]);
        p->errors[i].status = status;
        if (told)
            printf("%9.3f s  rank %d: %s ends with %s\n", (double)now_ns / 1e9, r, i < p->posted ? S->list[i].name : "join",
                   status ? p->errors[i].message : "its result");
        if (!status && i < p->posted && is_of_sets(&S->list[i]))
            p->set_ids[2] = (int)bhvd_handle_value(p->handles[i]);
        else if (!status && i < p->posted)
            check_result(r, i);
        p->gives_up |= status != BHVD_OK;
    }
}

static bool ends(int r)
{
    const struct bhvd_error *failure = &ranks[r].ctx->exec.failure;
    const bool is_done = !has_more(r) && progress[r].done == progress[r].handle_count;
    return failure->status || (is_under(HANG, r, false) ? ranks[r].ctx->closing.status != BHVD_OK : is_done);
}

static int64_t next_step_ns(int r) { return has_more(r) ? progress[r].next_ns : NEVER; }

static const struct program drawn_program = {may_take_step, take_step, collect_ended, ends, next_step_ns};

// ----------------------------------------------------------------------------------------------------------- ends

// Whether the rank is finished. While a program hangs, a relay waits for it to leave, and a join for it to join, without a limit.
static bool is_over(int r)
{
    bool one_hangs = false;
    for (int other = 0; other < network.size; other++)
        one_hangs |= is_under(HANG, other, true);
    const bool waits_for_it = ranks[r].leaving || (progress[r].has_joined && progress[r].done == progress[r].handle_count - 1);
    return ranks[r].over || is_under(STOP, r, true) || is_under(HANG, r, true) || (one_hangs && waits_for_it);
}

static bool all_are_over(void)
{
    for (int r = 0; r < network.size; r++)
        if (!is_over(r))
            return false;
    return true;
}

static void fail_unended(void)
{
    for (int r = 0; r < network.size; r++)
        if (!is_over(r))
            FAIL("rank %d has not ended after %d s: %d of %d operations are over", r, HORIZON_MS / 1000, progress[r].done,
                 progress[r].handle_count);
}

// ---------------------------------------------------------------------------------------------------------- invariants

static bool is_harmless(void)
{
    int64_t sum_ns = 0;
    for (int i = 0; i < network.fault_count; i++) {
        if (network.faults[i].end_ns == NEVER)
            return false;
        sum_ns += network.faults[i].end_ns - network.faults[i].begin_ns;
    }
    return sum_ns < HARMLESS_MS * MS;
}

// Whether the rank's process was stopped; messages to it may have found no space.
static bool was_stopped(int rank)
{
    for (int i = 0; i < network.fault_count; i++)
        if (network.faults[i].kind == STOP && network.faults[i].rank == rank)
            return true;
    return false;
}

// In a cut each side considers the other lost, and tells the ranks that it reaches. A rank's own failure may be a consequence, too.
static bool may_be_blamed(const struct bhvd_error *error)
{
    const int rank = error->rank;
    const struct bhvd_error *own = rank < 0 ? NULL : &ranks[rank].ctx->exec.failure;
    const bool is_consequence = own && own->status && (error->cause == BHVD_CAUSE_FAILED || error->cause == BHVD_CAUSE_TIMEOUT ||
                                                       own->cause == BHVD_CAUSE_TIMEOUT);
    if (!own || is_consequence)
        return true;
    for (int i = 0; i < network.fault_count; i++) {
        const struct fault *f = &network.faults[i];
        if (f->rank == rank || f->kind == CUT || (f->kind == CUT_PAIR && f->other == rank))
            return true;
    }
    return false;
}

// Whether a rank leaves early: neighbors of its neighbors may have started averages that these cannot finish (pairwise.h).
static bool leaves_somebody(void)
{
    for (int i = 0; i < network.fault_count; i++)
        if (network.faults[i].kind == LEAVE)
            return true;
    return false;
}

static int errors;

// The limit counts from the fault itself. WORD_MS is the time for the message from the rank that noticed it.
static void check_limit(int r)
{
    const struct fault *f = &network.faults[0];
    const int64_t took_ns = ranks[r].failed_ns - f->begin_ns;
    const bool is_lone = network.fault_count == 1 && (f->kind == STOP || f->kind == CUT) && r != f->rank;
    if (is_lone && ranks[r].ctx->exec.failure.cause == BHVD_CAUSE_SILENT && took_ns > (HEARTBEAT_MS + WORD_MS) * MS)
        FAIL("rank %d hears of it after %.1f s", r, (double)took_ns / 1e9);
}

static void check_errors(int r)
{
    check_limit(r);
    for (int i = 0; i < progress[r].handle_count; i++) {
        const struct bhvd_error *error = &progress[r].errors[i];
        if (!progress[r].is_done[i]) {
            CHECK(is_over(r));
            continue;
        }
        errors += error->status != BHVD_OK;
        if (error->status && is_harmless())
            FAIL("rank %d: %s", r, error->message);
        if (error->status == BHVD_OK || error->status == BHVD_ERR_SHUTDOWN)
            continue;
        const bool is_retracted = error->status == BHVD_ERR_MISMATCH && leaves_somebody();
        if (error->status != BHVD_ERR_PEER_LOST && error->status != BHVD_ERR_TIMEOUT && !is_retracted)
            FAIL("rank %d: %s", r, error->message);
        if (!may_be_blamed(error) && !was_stopped(r))
            FAIL("rank %d blames rank %d, which has no fault: %s", r, error->rank, error->message);
    }
}

static void describe(uint64_t number)
{
    printf("\nschedule %llu: %d ranks on %d hosts, %s %d, path \"%s\", %d operations%s, room %zu\n", (unsigned long long)number,
           network.size, network.host_of[network.size - 1] + 1, S->fanout ? "tree" : "star", S->fanout, S->path, S->operations,
           S->joins ? ", joins" : "", network.room);
    for (int i = 0; i < network.fault_count; i++) {
        const struct fault *f = &network.faults[i];
        printf("  %s of rank %d (%d) from %.3f s to %.3f s\n", FAULT_NAMES[f->kind], f->rank, f->other, (double)f->begin_ns / 1e9,
               f->end_ns == NEVER ? -1 : (double)f->end_ns / 1e9);
    }
}

static void set_options(int rank, struct bhvd_context_options *options)
{
    (void)rank;
    options->cache_capacity = S->cache;
    options->timeout_ms = TIMEOUT_MS;
    options->heartbeat_timeout_ms = HEARTBEAT_MS;
    options->stall_warning_ms = STALL_MS / 3;
    options->stall_shutdown_ms = STALL_MS;
    options->allreduce_path = S->path;
    options->negotiation = S->fanout ? "tree" : "star";
    options->negotiation_fanout = S->fanout;
}

static void run_schedule(uint64_t number)
{
    struct bhvd_error error;
    draw_all(number);
    if (told)
        describe(number);
    begin_ranks(set_options);
    for (int r = 0; r < network.size; r++) {
        bhvd_context *ctx = ranks[r].ctx;
        struct progress *p = &progress[r];
        memset(p, 0, sizeof *p);
        p->waits_for = -1;
        if (S->sizes[1] == network.size)
            continue;
        CHECK_STATUS(process_set_add(&ctx->sets, &ctx->exec, S->members[1], S->sizes[1], false, &p->set_ids[1], &error), BHVD_OK);
    }
    program = &drawn_program;
    if (!run_until(all_are_over, HORIZON_MS * MS))
        fail_unended();
    for (int r = 0; r < network.size; r++) {
        check_errors(r);
        for (int i = 0; i < progress[r].handle_count; i++)
            bhvd_handle_drop(progress[r].handles[i]);
    }
    end_ranks();
}

TEST(every_schedule_ends_as_its_faults_say)
{
    const char *one = getenv("BHVD_SCHEDULE"), *many = getenv("BHVD_SCHEDULES");
    const uint64_t count = many ? strtoull(many, NULL, 10) : SCHEDULES;
    told = one;
    for (uint64_t i = 0; i < (one ? 1 : count); i++) {
        current = one ? strtoull(one, NULL, 10) : i;
        run_schedule(current);
    }
    printf(" %llu schedules, %d operations ended by an error", (unsigned long long)count, errors);
}
