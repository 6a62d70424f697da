// Faults in simulated time: ranks on a network with delays and cuts, stopped or killed processes, and programs that hang or leave
// early, all drawn from a schedule number.
//
// The ranks are contexts without threads, and this file simulates the network: a *line* carries the bytes of one direction of one
// connection, each packet with its arrival time. It also replaces clock_gettime(), so no test sleeps, and a limit of a minute
// passes in a millisecond. Like its progress thread, a rank takes a turn when data arrives, when the program's time to post has
// come, and at least once in every heartbeat interval.
//
//     harmless     every fault is shorter than the shortest limit: each operation ends with the correct result
//     otherwise    each operation ends within the limits: correctly, or with an error that blames a faulty rank
//
// BHVD_SCHEDULES: how many (default: below); BHVD_SCHEDULE: run only this one, and print each step.
#include <math.h>
#include <poll.h>
#include <sys/syscall.h>

#include "check.h"

#include "base/fifo.h"
#include "core/api/lifecycle.h"
#include "core/context/context.h"
#include "core/context/operation.h"
#include "core/engine/engine.h"
#include "core/health/heartbeat.h"
#include "core/negotiation/departure.h"
#include "core/negotiation/relay.h"
#include "executor/tasks.h"

#define NEVER INT64_MAX
#define MS INT64_C(1000000)

enum {
    SCHEDULES = 3000,
    RANKS_MAX = 6, OPERATIONS_MAX = 10, FAULTS_MAX = 2, VALUES_MAX = 4096,
    HEARTBEAT_MS = 10000, TIMEOUT_MS = 20000, STALL_MS = 25000,
    WORD_MS = 6000,                 // a few times the longest delay
    HARMLESS_MS = 5000,             // a third of the heartbeats' limit is left for packets in flight, and for reading them late
    KEEPALIVE_MS = 330000,          // as set by transport/socket.c
    HORIZON_MS = 400000,
    TURNS_MAX = 100000
};

// ------------------------------------------------------------------------------------------------------ random choices

static uint64_t random_state, current;      // the number of the schedule

#define FAIL(format, ...) check_fail(__FILE__, __LINE__, "BHVD_SCHEDULE=%llu: " format, (unsigned long long)current, __VA_ARGS__)

static uint64_t draw(uint64_t below)
{
    random_state += 0x9e3779b97f4a7c15u;
    uint64_t x = random_state;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return (x ^ (x >> 31)) % below;
}

static bool one_in(uint64_t n) { return draw(n) == 0; }

enum { SETS = 3 };

enum fault_kind {
    STOP,                           // the process stops
    HANG,                           // the program hangs: the engine continues
    KILL,
    CUT,                            // from all other ranks
    CUT_PAIR,
    LEAVE,                          // before all operations are done
    FAULT_KINDS
};

static const char *const FAULT_NAMES[] = {"stop", "hang", "kill", "cut", "cut of a pair", "leave"};

struct fault {
    enum fault_kind kind;
    int rank, other;                // other: the second one of a pair
    int64_t begin_ns, end_ns;
};

struct operation {
    bhvd_kind kind;
    char name[8];
    int count, root;
    int set;                        // 0: all ranks; 1: some; 2: some, added and removed by operations
};

// The schedule drawn from a number.
struct schedule_of_faults {
    int ranks, fanout, operations;
    const char *path;
    struct operation list[OPERATIONS_MAX + 1];          // the last one stays empty
    int posts[RANKS_MAX];           // operations that a rank posts before it joins; all of them without joins
    bool joins;
    int host_of[RANKS_MAX];         // one host for each; or two, whose ranks share memory
    int32_t members[SETS][RANKS_MAX];
    int sizes[SETS];
    int cache;                      // capacity in responses
    size_t room;                    // unread bytes of messages that fit into a line
    int64_t delay_ns[RANKS_MAX][RANKS_MAX];
    struct fault faults[FAULTS_MAX];
    int fault_count;
};

static struct schedule_of_faults now_drawn;
static const struct schedule_of_faults *const S = &now_drawn;

static int64_t draw_length_ns(void) { return (int64_t)(one_in(4) ? draw(40000) : draw(HARMLESS_MS / 2)) * MS; }

static void draw_faults(void)
{
    struct schedule_of_faults *s = &now_drawn;
    s->fault_count = one_in(5) ? 0 : 1 + one_in(3);
    for (int i = 0; i < s->fault_count; i++) {
        struct fault *f = &s->faults[i];
        f->kind = draw(FAULT_KINDS);
        f->rank = (int)draw((uint64_t)s->ranks);
        f->begin_ns = (int64_t)draw(3000) * MS;
        f->other = (f->rank + 1 + (int)draw((uint64_t)s->ranks - 1)) % s->ranks;
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
    s->ranks = 2 + (int)draw(RANKS_MAX - 1);
    s->fanout = one_in(2) ? 0 : 1 + (int)draw(2);
    s->operations = 1 + (int)draw(OPERATIONS_MAX);
    s->path = paths[draw(4)];
    s->joins = one_in(4);
    s->cache = one_in(3) ? (int)draw(3) : 16;
    s->room = one_in(3) ? 512 + draw(4096) : 1 << 16;
    const int first = one_in(3) ? 1 + (int)draw((uint64_t)s->ranks - 1) : 0;
    for (int rank = 0; rank < s->ranks; rank++) {
        s->host_of[rank] = first ? rank >= first : rank;
        s->members[0][s->sizes[0]++] = rank;
        for (int set = 1; set < SETS; set++)
            if (one_in(2) || s->sizes[set] + s->ranks - rank <= 2)
                s->members[set][s->sizes[set]++] = rank;
    }
    for (int set = 1; set < SETS; set++)
        if (s->host_of[s->members[set][0]] == s->host_of[s->members[set][s->sizes[set] - 1]])
            s->sizes[set] = s->ranks;       // no such set: on one host operations run to completion, and so does a removal
    const bool adds = !first && !s->joins && one_in(3) && s->sizes[2] < s->ranks &&
                      (s->sizes[1] != s->sizes[2] || memcmp(s->members[1], s->members[2], (size_t)s->sizes[1] * sizeof(int32_t)));
    const int added = adds ? (int)draw((uint64_t)s->operations) : s->operations, removed = added + 1 + (int)draw(OPERATIONS_MAX);
    const int names = 1 + (int)draw(4);         // fewer than operations: later ones use a cached id
    for (int i = 0; i < s->operations; i++) {
        struct operation *op = &s->list[i];
        static const bhvd_kind kinds[] = {BHVD_ALLREDUCE, BHVD_ALLREDUCE, BHVD_D_FP_S, BHVD_C_LP_S, BHVD_REDUCESCATTER, BHVD_ALLTOALL,
                                          BHVD_BROADCAST, BHVD_ALLGATHER};
        const int kind = s->joins ? 0 : (int)draw(sizeof kinds / sizeof kinds[0]), name = (int)draw((uint64_t)names);
        const int sets[] = {0, s->sizes[1] < s->ranks, i > added && i < removed ? 2 : 0};
        *op = (struct operation){.kind = kinds[kind], .set = s->joins ? 0 : sets[draw(SETS)], .count = name == 3 ? VALUES_MAX : 1 + 37 * name};
        op->count -= op->kind == BHVD_D_FP_S && one_in(8);      // changes the arguments of a pairwise operation
        op->root = s->members[op->set][name % s->sizes[op->set]];
        snprintf(op->name, sizeof op->name, "%c%d", "rrncsabg"[kind], name);
        if (i == added || i == removed)
            *op = (struct operation){.kind = i == added ? BHVD_PROCESS_SET_ADD : BHVD_PROCESS_SET_REMOVE, .name = "set"};
    }
    end_together();
    const int64_t far_ns = 1 + (int64_t)draw(40) * MS;
    for (int from = 0; from < s->ranks; from++) {
        s->posts[from] = s->joins ? (int)draw((uint64_t)s->operations + 1) : s->operations;
        for (int to = 0; to < from; to++)
            s->delay_ns[from][to] = s->delay_ns[to][from] = 10000 + (int64_t)draw((uint64_t)far_ns);
    }
    draw_faults();
}

// ------------------------------------------------------------------------------------------------------------- time

static int64_t now_ns = -1;         // -1: no schedule runs
static bool told;                   // whether steps are printed

int clock_gettime(clockid_t id, struct timespec *t)
{
    if (id != CLOCK_MONOTONIC || now_ns < 0)
        return (int)syscall(SYS_clock_gettime, id, t);
    *t = (struct timespec){now_ns / 1000000000, now_ns % 1000000000};
    return 0;
}

int ppoll(struct pollfd *fds, nfds_t count, const struct timespec *timeout, const sigset_t *mask)
{
    (void)fds, (void)count, (void)timeout, (void)mask;
    check_fail(__FILE__, __LINE__, "a rank sleeps within an operation; this test has one thread for all");
}

// ----------------------------------------------------------------------------------------------------------- network

struct packet {
    struct packet *next;
    int64_t sent_ns, arrives_ns;
    bool has_arrived;
    size_t size, taken;
    unsigned char bytes[];
};

// One direction of one connection. A channel points to it instead of a ring, which only the channel's own functions use.
struct line {
    struct FIFO(struct packet) packets;
    int from, to;
    size_t room;                    // capacity for unread bytes
    size_t under_way;               // unread bytes
    int64_t last_ns;                // when the last packet arrives; packets stay in order
    int64_t ends_ns;                // when the end of the sender's process arrives; NEVER: it runs
};

enum { CONTROL, DATA, CHANNELS };

static struct line lines[RANKS_MAX][RANKS_MAX][CHANNELS];

struct rank {
    bhvd_context *ctx;
    bool due, leaving, over;        // over: its process has ended
    bool gives_up;                  // after an error
    int64_t look_ns, program_ns, leaves_ns, failed_ns;
    int set_ids[SETS];
    int posted, waits_for;          // operations; the one to wait for before the next is posted, -1: none
    bool has_joined;
    bhvd_handle *handles[OPERATIONS_MAX + 1];
    struct bhvd_error errors[OPERATIONS_MAX + 1];
    bool is_done[OPERATIONS_MAX + 1];
    int handle_count, done;
    float src[OPERATIONS_MAX + 1][RANKS_MAX * VALUES_MAX], dst[OPERATIONS_MAX + 1][VALUES_MAX];
};

static struct rank ranks[RANKS_MAX];

static struct line *line_out(const struct channel *channel) { return (struct line *)(void *)channel->tx; }
static struct line *line_in(const struct channel *channel) { return (struct line *)(void *)channel->rx; }

// Whether the fault blocks bytes.
static bool fault_cuts(const struct fault *f, int from, int to)
{
    if (f->kind == CUT)
        return f->rank == from || f->rank == to;
    return f->kind == CUT_PAIR && ((f->rank == from && f->other == to) || (f->rank == to && f->other == from));
}

// Packets in flight when a cut begins are lost, and sent again when it ends.
static int64_t arrival_ns(int from, int to)
{
    const int64_t delay_ns = S->delay_ns[from][to] + (int64_t)draw((uint64_t)S->delay_ns[from][to]) + (one_in(300) ? (int64_t)draw(1500) * MS : 0);
    int64_t arrives_ns = now_ns + delay_ns;
    for (int i = 0; i < S->fault_count; i++) {
        const struct fault *f = &S->faults[i];
        if (!fault_cuts(f, from, to) || now_ns >= f->end_ns || arrives_ns < f->begin_ns)
            continue;
        if (f->end_ns == NEVER)
            return NEVER;
        arrives_ns = f->end_ns + delay_ns > arrives_ns ? f->end_ns + delay_ns : arrives_ns;
    }
    return arrives_ns;
}

static int64_t put_last(struct line *line)
{
    const int64_t arrives_ns = arrival_ns(line->from, line->to);
    line->last_ns = arrives_ns > line->last_ns ? arrives_ns : line->last_ns;
    return line->last_ns;
}

static bhvd_status send_bytes(struct channel *channel, const struct iovec *parts, int count, size_t *moved)
{
    struct line *line = line_out(channel);
    *moved = 0;
    if (line_in(channel)->ends_ns <= now_ns)
        return BHVD_ERR_PEER_LOST;
    for (int i = 0; i < count && line->under_way < line->room; i++) {
        const size_t room = line->room - line->under_way, size = parts[i].iov_len < room ? parts[i].iov_len : room;
        struct packet *packet = malloc(sizeof *packet + size);
        *packet = (struct packet){.sent_ns = now_ns, .arrives_ns = put_last(line), .size = size};
        memcpy(packet->bytes, parts[i].iov_base, size);
        fifo_put(&line->packets, packet, next);
        line->under_way += size;
        *moved += size;
    }
    return BHVD_OK;
}

// Whether keep-alive probes have failed.
static bool is_cut_for_good(const struct line *line)
{
    for (int i = 0; i < S->fault_count; i++) {
        const struct fault *f = &S->faults[i];
        if (fault_cuts(f, line->from, line->to) && f->end_ns == NEVER && now_ns >= f->begin_ns + KEEPALIVE_MS * MS)
            return true;
    }
    return false;
}

static bhvd_status take_bytes(struct channel *channel, void *dst, size_t size, size_t *moved)
{
    struct line *line = line_in(channel);
    *moved = 0;
    for (struct packet *packet; *moved < size && (packet = line->packets.head) && packet->arrives_ns <= now_ns;) {
        const size_t left = packet->size - packet->taken, n = left < size - *moved ? left : size - *moved;
        memcpy((unsigned char *)dst + *moved, packet->bytes + packet->taken, n);
        packet->taken += n;
        *moved += n;
        ranks[line->from].due |= line->under_way >= line->room;
        line->under_way -= n;
        if (packet->taken == packet->size)
            free(fifo_take(&line->packets, next));
    }
    const bool is_at_end = line->ends_ns <= now_ns && !line->packets.head;
    return *moved == 0 && size && (is_at_end || is_cut_for_good(line)) ? BHVD_ERR_PEER_LOST : BHVD_OK;
}

// Like TCP's data without acknowledgement: the kernel acknowledges even for a stopped process.
static int64_t unanswered_ns(struct channel *channel, int64_t checked_ns)
{
    for (const struct packet *packet = line_out(channel)->packets.head; packet; packet = packet->next)
        if (packet->arrives_ns > checked_ns)
            return checked_ns - packet->sent_ns;
    return -1;
}

// Like a socket's: readiness is known only by reading.
static const struct channel_ops line_ops = {.send = send_bytes, .recv = take_bytes, .silence_ns = unanswered_ns};

static void connect_lines(struct connections *c)
{
    for (int peer = 0; peer < c->size; peer++) {
        if (peer == c->rank)
            continue;
        struct link *link = &c->links[peer];
        struct channel *channels[] = {&link->control, &link->data_channels[0].channel};
        if (S->host_of[peer] != S->host_of[c->rank])
            link->local_index = -1;
        c->host_of[peer] = S->host_of[peer];
        for (int i = 0; i < CHANNELS; i++) {
            channels[i]->ops = &line_ops;
            channels[i]->tx = (struct ring *)(void *)&lines[c->rank][peer][i];
            channels[i]->rx = (struct ring *)(void *)&lines[peer][c->rank][i];
        }
    }
    c->host_of[c->rank] = S->host_of[c->rank];
}

// Ends a rank's process: its data arrives, followed by the end.
static void end_process(int r)
{
    ranks[r].over = true;
    for (int peer = 0; peer < S->ranks; peer++)
        for (int i = 0; i < CHANNELS && peer != r; i++)
            lines[r][peer][i].ends_ns = put_last(&lines[r][peer][i]);
}

// ------------------------------------------------------------------------------------------------------------- ranks

static bhvd_context *make_context(int rank, void *world)
{
    struct bhvd_error error;
    const struct bhvd_context_options options = {
        .rank = rank, .size = S->ranks, .transport = "inproc", .inproc_world = world, .cache_capacity = S->cache, .timeout_ms = TIMEOUT_MS,
        .heartbeat_timeout_ms = HEARTBEAT_MS, .stall_warning_ms = STALL_MS / 3, .stall_shutdown_ms = STALL_MS, .allreduce_path = S->path, .fusion_threshold = 1 << 16,
        .negotiation = S->fanout ? "tree" : "star", .negotiation_fanout = S->fanout};
    bhvd_context *ctx;
    int id;
    CHECK_STATUS(context_new(&options, &ctx, &error), BHVD_OK);
    CHECK_STATUS(connections_init(&ctx->exec.connections, &ctx->options, NULL, &error), BHVD_OK);
    connect_lines(&ctx->exec.connections);
    CHECK_STATUS(context_prepare(ctx), BHVD_OK);
    for (int set = 0; set < 1 + (S->sizes[1] < S->ranks); set++)
        CHECK_STATUS(process_set_add(&ctx->sets, &ctx->exec, S->members[set], S->sizes[set], false, &id, &error), BHVD_OK);
    return ctx;
}

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
    const float *values = ranks[r].dst[number];
    struct bhvd_result result = {.nbytes = (size_t)op->count * sizeof *values};
    if (is_allocated(op->kind)) {
        CHECK_STATUS(bhvd_result(ranks[r].handles[number], 0, &result), BHVD_OK);
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
    struct rank *rank = &ranks[r];
    const bool is_join = rank->posted == S->posts[r];
    const int number = rank->posted;
    const struct operation *op = &S->list[number];
    const bool has_tensor = !is_join && !is_of_sets(op), adds = !is_join && op->kind == BHVD_PROCESS_SET_ADD;
    const int64_t shape = op->count * (op->kind == BHVD_ALLTOALL ? S->sizes[op->set] : 1);
    const struct bhvd_tensor tensor = {.shape = &shape, .ndim = 1, .dtype = BHVD_FLOAT32, .src = rank->src[number],
                                       .dst = is_allocated(op->kind) ? NULL : rank->dst[number]};
    for (int i = 0; has_tensor && i < shape; i++)
        rank->src[number][i] = value_of(r, number, i);
    const struct bhvd_args args = {
        .kind = is_join ? BHVD_JOIN : op->kind, .name = is_join ? "join" : op->name, .tensors = &tensor, .tensor_count = has_tensor,
        .op = BHVD_OP_SUM, .root_rank = !is_join && op->kind == BHVD_PROCESS_SET_REMOVE ? rank->set_ids[2] : has_tensor ? op->root : 0,
        .process_set = is_join ? 0 : rank->set_ids[op->set], .topology = BHVD_TOPOLOGY_RING, .codec = op->kind == BHVD_C_LP_S ? BHVD_CODEC_FLOAT16 : BHVD_CODEC_NONE,
        .prescale_factor = 1.0, .postscale_factor = 1.0, .device = -1, .splits = adds ? S->members[2] : NULL,
        .split_count = adds ? (size_t)S->sizes[2] : 0};
    const int at = rank->handle_count;
    rank->has_joined |= is_join;
    rank->posted += !is_join;
    const bool is_member = is_join || position_of(r, op) >= 0;
    if (!is_member || bhvd_post(rank->ctx, &args, &rank->handles[at], &rank->errors[at]) != BHVD_OK) {
        rank->handles[at] = NULL;
        rank->is_done[at] = true;
        rank->done++;
        rank->gives_up |= is_member;
    }
    rank->handle_count++;
}

static bool name_is_free(const struct rank *rank, const struct operation *op)
{
    for (int i = 0; i < rank->handle_count && i < rank->posted; i++)
        if (!rank->is_done[i] && strcmp(S->list[i].name, op->name) == 0 && S->list[i].set == op->set)
            return false;
    return true;
}

static bool is_under(enum fault_kind kind, int r, bool for_good)
{
    for (int i = 0; i < S->fault_count; i++) {
        const struct fault *f = &S->faults[i];
        if (f->kind == kind && f->rank == r && now_ns >= f->begin_ns && (for_good ? f->end_ns == NEVER : now_ns < f->end_ns))
            return true;
    }
    return false;
}

static bool has_more(int r) { return !ranks[r].gives_up && (ranks[r].posted < S->posts[r] || (S->joins && !ranks[r].has_joined)); }

// The next operation is posted after the computation and the operation to wait for; a name is in use once at a time.
static bool may_post(int r)
{
    const struct rank *rank = &ranks[r];
    if (rank->over || rank->leaving || is_under(HANG, r, false) || !has_more(r) || now_ns < rank->program_ns || (rank->waits_for >= 0 && !rank->is_done[rank->waits_for]))
        return false;
    if (rank->posted == S->posts[r])
        return true;
    const struct operation *next = &S->list[rank->posted];
    return next->kind == BHVD_PROCESS_SET_REMOVE ? rank->done == rank->handle_count : name_is_free(rank, next);
}

static void take_program_step(int r)
{
    struct rank *rank = &ranks[r];
    post(r);
    const int last = rank->handle_count - 1;
    rank->waits_for = one_in(2) || (last < rank->posted && is_of_sets(&S->list[last])) ? last : -1;
    rank->program_ns = now_ns + (one_in(3) ? (int64_t)draw(1500) * MS : one_in(2) ? (int64_t)draw(2000000) : 0);
}

static void collect_ended(int r)
{
    struct rank *rank = &ranks[r];
    for (int i = 0; i < rank->handle_count; i++) {
        if (rank->is_done[i] || !bhvd_poll(rank->handles[i]))
            continue;
        rank->is_done[i] = true;
        rank->done++;
        const bhvd_status status = bhvd_wait(rank->handles[i], 0, &rank->errors[i]);
        rank->errors[i].status = status;
        if (told)
            printf("%9.3f s  rank %d: %s ends with %s\n", (double)now_ns / 1e9, r, i < rank->posted ? S->list[i].name : "join",
                   status ? rank->errors[i].message : "its result");
        if (!status && i < rank->posted && is_of_sets(&S->list[i]))
            rank->set_ids[2] = (int)bhvd_handle_value(rank->handles[i]);
        else if (!status && i < rank->posted)
            check_result(r, i);
        rank->gives_up |= status != BHVD_OK;
    }
}

static bool has_unwritten(const bhvd_context *ctx)
{
    for (int peer = 0; peer < S->ranks; peer++)
        if (peer != ctx->options.rank && ctx->exec.connections.links[peer].state == LINK_OPEN &&
            ctx->exec.connections.links[peer].control_out.size)
            return true;
    return false;
}

// Like progress_stop, but one step at a time.
static void leave(int r)
{
    struct rank *rank = &ranks[r];
    bhvd_context *ctx = rank->ctx;
    if (!rank->leaving) {
        rank->leaving = true;
        rank->leaves_ns = now_ns + (ctx->goodbye_sent ? 1000 : TIMEOUT_MS) * MS;
        CHECK_STATUS(departure_begin(ctx), BHVD_OK);
    }
    const bool is_busy = !ctx->exec.failure.status && engine_is_busy(ctx) && now_ns < rank->leaves_ns;
    if (!ctx->goodbye_sent && !is_busy && departure_is_free(ctx)) {
        executor_fail(&ctx->exec, BHVD_ERR_SHUTDOWN, "Horovod has been shut down. (this rank left the job)");
        tasks_abort(&ctx->exec);
        departure_send_goodbye(ctx);
        rank->leaves_ns = now_ns + 1000 * MS;
    }
    if (!ctx->goodbye_sent)
        return;
    for (int peer = 0; peer < S->ranks; peer++)
        if (peer != r && ctx->exec.connections.links[peer].state == LINK_OPEN)
            link_flush(&ctx->exec.connections.links[peer]);
    if (!has_unwritten(ctx) || now_ns >= rank->leaves_ns)
        end_process(r);
}

static void run_engine(bhvd_context *ctx)
{
    for (int i = 0;; i++) {
        bool moved = engine_poll(ctx, true);
        while (engine_has_next(ctx)) {
            engine_execute_next(ctx);
            moved = true;
        }
        if (!moved)
            return;
        CHECK(i < TURNS_MAX);
    }
}

static void turn(int r)
{
    struct rank *rank = &ranks[r];
    rank->due = false;
    do {
        while (may_post(r))
            take_program_step(r);
        run_engine(rank->ctx);
        const struct bhvd_error *failure = &rank->ctx->exec.failure;
        if (failure->status && !rank->failed_ns)
            rank->failed_ns = now_ns;
        engine_check_timers(rank->ctx);
        collect_ended(r);
    } while (may_post(r));
    rank->look_ns = now_ns + rank->ctx->heartbeat->interval_ms * MS;
    const bool hangs = is_under(HANG, r, false), is_done = !has_more(r) && rank->done == rank->handle_count;
    if (rank->leaving || rank->ctx->exec.failure.status || (hangs ? rank->ctx->closing.status != BHVD_OK : is_done))
        leave(r);
    if (rank->leaving && !rank->over)
        rank->look_ns = now_ns + MS;
}

// --------------------------------------------------------------------------------------------------------------- job

// Starts the kills and early departures that are due.
static void begin_faults(void)
{
    for (int i = 0; i < S->fault_count; i++) {
        const struct fault *f = &S->faults[i];
        if (f->begin_ns > now_ns || ranks[f->rank].over)
            continue;
        if (f->kind == KILL)
            end_process(f->rank);
        else if (f->kind == LEAVE && !ranks[f->rank].leaving && !is_under(STOP, f->rank, false))
            leave(f->rank);
    }
}

static void earlier(int64_t *first_ns, int64_t at_ns)
{
    if (at_ns > now_ns && at_ns < *first_ns)
        *first_ns = at_ns;
}

static int64_t next_event_ns(void)
{
    int64_t first_ns = NEVER;
    for (int r = 0; r < S->ranks; r++) {
        if (ranks[r].over)
            continue;
        if (!is_under(STOP, r, false)) {
            earlier(&first_ns, ranks[r].look_ns);
            if (has_more(r))
                earlier(&first_ns, ranks[r].program_ns);
        }
        for (int from = 0; from < S->ranks; from++) {
            for (int i = 0; i < CHANNELS; i++) {
                for (const struct packet *packet = lines[from][r][i].packets.head; packet; packet = packet->next)
                    earlier(&first_ns, packet->arrives_ns);
                earlier(&first_ns, lines[from][r][i].ends_ns);
            }
        }
    }
    for (int i = 0; i < S->fault_count; i++) {
        earlier(&first_ns, S->faults[i].begin_ns);
        earlier(&first_ns, S->faults[i].end_ns);
        earlier(&first_ns, S->faults[i].begin_ns + KEEPALIVE_MS * MS);
    }
    return first_ns;
}

static void note_arrivals(void)
{
    for (int to = 0; to < S->ranks; to++) {
        for (int from = 0; from < S->ranks; from++) {
            for (int i = 0; i < CHANNELS; i++) {
                struct line *line = &lines[from][to][i];
                for (struct packet *packet = line->packets.head; packet; packet = packet->next) {
                    ranks[to].due |= !packet->has_arrived && packet->arrives_ns <= now_ns;
                    packet->has_arrived |= packet->arrives_ns <= now_ns;
                }
                ranks[to].due |= line->ends_ns == now_ns;
            }
        }
    }
}

static bool is_due(int r)
{
    return !ranks[r].over && !is_under(STOP, r, false) && (ranks[r].due || now_ns >= ranks[r].look_ns || may_post(r));
}

// Whether the rank is finished. While a program hangs, a relay waits for it to leave, and a join for it to join, without a limit.
static bool is_over(int r)
{
    bool one_hangs = false;
    for (int other = 0; other < S->ranks; other++)
        one_hangs |= is_under(HANG, other, true);
    const bool waits_for_it = ranks[r].leaving || (ranks[r].has_joined && ranks[r].done == ranks[r].handle_count - 1);
    return ranks[r].over || is_under(STOP, r, true) || is_under(HANG, r, true) || (one_hangs && waits_for_it);
}

static bool all_are_over(void)
{
    for (int r = 0; r < S->ranks; r++)
        if (!is_over(r))
            return false;
    return true;
}

static void run_job(void)
{
    while (!all_are_over()) {
        begin_faults();
        note_arrivals();
        for (bool moved = true; moved;) {
            moved = false;
            for (int i = 0, first = (int)draw((uint64_t)S->ranks); i < S->ranks; i++) {
                const int r = (first + i) % S->ranks;
                if (is_due(r)) {
                    turn(r);
                    moved = true;
                }
            }
        }
        if (all_are_over())
            break;
        const int64_t next_ns = next_event_ns();
        for (int r = 0; r < S->ranks && (next_ns == NEVER || next_ns > HORIZON_MS * MS); r++)
            if (!is_over(r))
                FAIL("rank %d has not ended after %d s: %d of %d operations are over", r, HORIZON_MS / 1000, ranks[r].done,
                     ranks[r].handle_count);
        now_ns = next_ns;
    }
}

// ---------------------------------------------------------------------------------------------------------- invariants

static bool is_harmless(void)
{
    int64_t sum_ns = 0;
    for (int i = 0; i < S->fault_count; i++) {
        if (S->faults[i].end_ns == NEVER)
            return false;
        sum_ns += S->faults[i].end_ns - S->faults[i].begin_ns;
    }
    return sum_ns < HARMLESS_MS * MS;
}

// Whether the rank's process was stopped; messages to it may have found no space.
static bool was_stopped(int rank)
{
    for (int i = 0; i < S->fault_count; i++)
        if (S->faults[i].kind == STOP && S->faults[i].rank == rank)
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
    for (int i = 0; i < S->fault_count; i++)
        if (S->faults[i].rank == rank || S->faults[i].kind == CUT || (S->faults[i].kind == CUT_PAIR && S->faults[i].other == rank))
            return true;
    return false;
}

// Whether a rank leaves early: neighbors of its neighbors may have started averages that these cannot finish (pairwise.h).
static bool leaves_somebody(void)
{
    for (int i = 0; i < S->fault_count; i++)
        if (S->faults[i].kind == LEAVE)
            return true;
    return false;
}

static int errors;

// The limit counts from the fault itself. WORD_MS is the time for the message from the rank that noticed it.
static void check_limit(int r)
{
    const struct fault *f = &S->faults[0];
    const int64_t took_ns = ranks[r].failed_ns - f->begin_ns;
    const bool is_lone = S->fault_count == 1 && (f->kind == STOP || f->kind == CUT) && r != f->rank;
    if (is_lone && ranks[r].ctx->exec.failure.cause == BHVD_CAUSE_SILENT && took_ns > (HEARTBEAT_MS + WORD_MS) * MS)
        FAIL("rank %d hears of it after %.1f s", r, (double)took_ns / 1e9);
}

static void check_errors(int r)
{
    check_limit(r);
    for (int i = 0; i < ranks[r].handle_count; i++) {
        const struct bhvd_error *error = &ranks[r].errors[i];
        if (!ranks[r].is_done[i]) {
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
    printf("\nschedule %llu: %d ranks on %d hosts, %s %d, path \"%s\", %d operations%s, room %zu\n", (unsigned long long)number, S->ranks, S->host_of[S->ranks - 1] + 1,
           S->fanout ? "tree" : "star", S->fanout, S->path, S->operations, S->joins ? ", joins" : "", S->room);
    for (int i = 0; i < S->fault_count; i++)
        printf("  %s of rank %d (%d) from %.3f s to %.3f s\n", FAULT_NAMES[S->faults[i].kind], S->faults[i].rank, S->faults[i].other,
               (double)S->faults[i].begin_ns / 1e9, S->faults[i].end_ns == NEVER ? -1 : (double)S->faults[i].end_ns / 1e9);
}

static void clear_network(void)
{
    for (int from = 0; from < RANKS_MAX; from++) {
        for (int to = 0; to < RANKS_MAX; to++) {
            for (int i = 0; i < CHANNELS; i++) {
                struct line *line = &lines[from][to][i];
                for (struct packet *packet; (packet = fifo_take(&line->packets, next));)
                    free(packet);
                *line = (struct line){.from = from, .to = to, .room = i == DATA ? S->room : 1 << 16, .ends_ns = NEVER};
            }
        }
    }
}

static void run_schedule(uint64_t number)
{
    draw_all(number);
    if (told)
        describe(number);
    now_ns = 1;
    clear_network();
    void *world = bhvd_inproc_world_create(S->ranks);
    for (int r = 0; r < S->ranks; r++) {
        memset(&ranks[r], 0, sizeof ranks[r]);
        ranks[r].ctx = make_context(r, world);
        ranks[r].waits_for = -1;
        ranks[r].set_ids[1] = 1;
    }
    run_job();
    for (int r = 0; r < S->ranks; r++)
        check_errors(r);
    for (int r = 0; r < S->ranks; r++) {
        executor_fail(&ranks[r].ctx->exec, BHVD_ERR_SHUTDOWN, "the end of the test");
        tasks_abort(&ranks[r].ctx->exec);
        atomic_store(&ranks[r].ctx->leaving, true);      // simulated time stands still, so nothing may wait
        for (int i = 0; i < ranks[r].handle_count; i++)
            bhvd_handle_drop(ranks[r].handles[i]);
        bhvd_context_destroy(ranks[r].ctx);
    }
    bhvd_inproc_world_destroy(world);
    clear_network();
    now_ns = -1;
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
