// Ranks on a virtual clock and a virtual network, all in one thread: limits of minutes pass in milliseconds, and nothing depends
// on the machine.
//
// The ranks are contexts without threads. A *line* carries the bytes of one direction of one connection, each packet with its
// arrival time; clock_gettime() returns the virtual time. Like its progress thread, a rank takes a turn when data arrives, when
// its program has posted, and at least once in every heartbeat interval. Faults stop or end processes, or cut connections.
//
// A test posts operations between calls of run_until(), or supplies a `struct program` that posts in the ranks' turns. Operations
// must not run to completion at once, as they do if all members are on one host: nobody else could run meanwhile.
#pragma once

#include <poll.h>
#include <sys/syscall.h>

#include "check.h"

#include "base/containers.h"
#include "core/api/api.h"
#include "core/context/context.h"
#include "core/context/operation.h"
#include "core/engine/engine.h"
#include "core/health/health.h"
#include "core/negotiation/departure.h"
#include "executor/task.h"

#define NEVER INT64_MAX
#define MS INT64_C(1000000)

enum {
    RANKS_MAX = 6, FAULTS_MAX = RANKS_MAX,
    KEEPALIVE_MS = 330000,          // as set by transport/socket.c
    LAST_FRAMES_MS = 1000,          // GOODBYE_MS of core/api/progress.c
    TURNS_MAX = 100000
};

enum fault_kind {
    STOP,                           // the process stops
    HANG,                           // the program hangs: the engine continues
    KILL,
    CUT,                            // from all other ranks
    CUT_PAIR,
    LEAVE,                          // before all operations are done
    FAULT_KINDS
};

struct fault {
    enum fault_kind kind;
    int rank, other;                // other: the second one of a pair
    int64_t begin_ns, end_ns;
};

struct network {
    int size;                       // ranks
    int host_of[RANKS_MAX];
    int64_t delay_ns[RANKS_MAX][RANKS_MAX];
    bool varies;                    // delays vary up to twice delay_ns, and rarely by more than a second
    size_t room;                    // unread bytes of messages that fit into a line
    struct fault faults[FAULTS_MAX];
    int fault_count;
};

static struct network network;

// ------------------------------------------------------------------------------------------------------ random choices

static uint64_t random_state;

static uint64_t draw(uint64_t below)
{
    random_state += 0x9e3779b97f4a7c15u;
    uint64_t x = random_state;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return (x ^ (x >> 31)) % below;
}

static bool one_in(uint64_t n) { return draw(n) == 0; }

// ------------------------------------------------------------------------------------------------------------- time

static int64_t now_ns = -1;         // -1: no ranks exist, and time is real

int clock_gettime(clockid_t id, struct timespec *t)
{
    if (id != CLOCK_MONOTONIC || now_ns < 0)
        return (int)syscall(SYS_clock_gettime, id, t);
    *t = (struct timespec){now_ns / 1000000000, now_ns % 1000000000};
    return 0;
}

int ppoll(struct pollfd *fds, nfds_t count, const struct timespec *timeout, const sigset_t *mask)
{
    if (now_ns < 0) {
        struct timespec left = timeout ? *timeout : (struct timespec){0};       // the kernel writes it
        return (int)syscall(SYS_ppoll, fds, count, timeout ? &left : NULL, mask, sizeof(uint64_t));
    }
    check_fail(__FILE__, __LINE__, "a rank sleeps until an operation ends: all ranks have this one thread, so none would end it");
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
    int64_t look_ns, leaves_ns, failed_ns;
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
    int64_t delay_ns = network.delay_ns[from][to];
    if (network.varies)
        delay_ns += (int64_t)draw((uint64_t)delay_ns) + (one_in(300) ? (int64_t)draw(1500) * MS : 0);
    int64_t arrives_ns = now_ns + delay_ns;
    for (int i = 0; i < network.fault_count; i++) {
        const struct fault *f = &network.faults[i];
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
    for (int i = 0; i < network.fault_count; i++) {
        const struct fault *f = &network.faults[i];
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
        if (network.host_of[peer] != network.host_of[c->rank])
            link->local_index = -1;
        c->host_of[peer] = network.host_of[peer];
        for (int i = 0; i < CHANNELS; i++) {
            channels[i]->ops = &line_ops;
            channels[i]->tx = (struct ring *)(void *)&lines[c->rank][peer][i];
            channels[i]->rx = (struct ring *)(void *)&lines[peer][c->rank][i];
        }
    }
    c->host_of[c->rank] = network.host_of[c->rank];
}

static void clear_lines(void)
{
    for (int from = 0; from < RANKS_MAX; from++) {
        for (int to = 0; to < RANKS_MAX; to++) {
            for (int i = 0; i < CHANNELS; i++) {
                struct line *line = &lines[from][to][i];
                for (struct packet *packet; (packet = fifo_take(&line->packets, next));)
                    free(packet);
                *line = (struct line){.from = from, .to = to, .room = i == DATA ? network.room : 1 << 16, .ends_ns = NEVER};
            }
        }
    }
}

// ------------------------------------------------------------------------------------------------------------- turns

// What a rank's program does in the rank's turns.
struct program {
    bool (*may_post)(int r);        // now
    void (*post)(int r);
    void (*collect)(int r);         // takes the results of operations that have ended
    bool (*ends)(int r);            // leaves the job
    int64_t (*next_ns)(int r);      // when it posts next, if that depends on the time; else NEVER
};

static const struct program *program;       // NULL: tests post between runs

static bool may_post(int r) { return program && program->may_post(r); }

// Whether a fault of this kind affects the rank now; for_good: and never ends.
static bool is_under(enum fault_kind kind, int r, bool for_good)
{
    for (int i = 0; i < network.fault_count; i++) {
        const struct fault *f = &network.faults[i];
        if (f->kind == kind && f->rank == r && now_ns >= f->begin_ns && (for_good ? f->end_ns == NEVER : now_ns < f->end_ns))
            return true;
    }
    return false;
}

// Ends a rank's process: its data arrives, followed by the end.
static void end_process(int r)
{
    ranks[r].over = true;
    for (int peer = 0; peer < network.size; peer++)
        for (int i = 0; i < CHANNELS && peer != r; i++)
            lines[r][peer][i].ends_ns = put_last(&lines[r][peer][i]);
}

static bool has_unwritten(const bhvd_context *ctx)
{
    for (int peer = 0; peer < network.size; peer++)
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
        rank->leaves_ns = now_ns + (ctx->goodbye_sent ? LAST_FRAMES_MS : ctx->options.timeout_ms) * MS;
        CHECK_STATUS(departure_begin(ctx), BHVD_OK);
    }
    const bool is_busy = !ctx->exec.failure.status && engine_is_busy(ctx) && now_ns < rank->leaves_ns;
    if (!ctx->goodbye_sent && !is_busy && departure_is_free(ctx)) {
        executor_fail(&ctx->exec, BHVD_ERR_SHUTDOWN, "Horovod has been shut down. (this rank left the job)");
        tasks_abort(&ctx->exec);
        departure_send_goodbye(ctx);
        rank->leaves_ns = now_ns + LAST_FRAMES_MS * MS;
    }
    if (!ctx->goodbye_sent)
        return;
    for (int peer = 0; peer < network.size; peer++)
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
            program->post(r);
        run_engine(rank->ctx);
        engine_check_timers(rank->ctx);
        if (rank->ctx->exec.failure.status && !rank->failed_ns)
            rank->failed_ns = now_ns;
        if (program)
            program->collect(r);
    } while (may_post(r));
    rank->look_ns = now_ns + rank->ctx->heartbeat->interval_ms * MS;
    if (rank->leaving || (program && program->ends(r)))
        leave(r);
    if (rank->leaving && !rank->over)
        rank->look_ns = now_ns + MS;
}

// Starts the kills and early departures that are due.
static void begin_faults(void)
{
    for (int i = 0; i < network.fault_count; i++) {
        const struct fault *f = &network.faults[i];
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
    for (int r = 0; r < network.size; r++) {
        if (ranks[r].over)
            continue;
        if (!is_under(STOP, r, false)) {
            earlier(&first_ns, ranks[r].look_ns);
            if (program)
                earlier(&first_ns, program->next_ns(r));
        }
        for (int from = 0; from < network.size; from++) {
            for (int i = 0; i < CHANNELS; i++) {
                for (const struct packet *packet = lines[from][r][i].packets.head; packet; packet = packet->next)
                    earlier(&first_ns, packet->arrives_ns);
                earlier(&first_ns, lines[from][r][i].ends_ns);
            }
        }
    }
    for (int i = 0; i < network.fault_count; i++) {
        earlier(&first_ns, network.faults[i].begin_ns);
        earlier(&first_ns, network.faults[i].end_ns);
        earlier(&first_ns, network.faults[i].begin_ns + KEEPALIVE_MS * MS);
    }
    return first_ns;
}

static void note_arrivals(void)
{
    for (int to = 0; to < network.size; to++) {
        for (int from = 0; from < network.size; from++) {
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
    const struct rank *rank = &ranks[r];
    return !rank->over && !is_under(STOP, r, false) &&
           (rank->due || now_ns >= rank->look_ns || atomic_load(&rank->ctx->posted_count) || may_post(r));
}

// Runs the ranks until a condition holds, or no event is left until this time. Returns whether the condition holds.
static bool run_until(bool (*is_met)(void), int64_t until_ns)
{
    while (!is_met()) {
        begin_faults();
        note_arrivals();
        for (bool moved = true; moved;) {
            moved = false;
            for (int i = 0, first = (int)draw((uint64_t)network.size); i < network.size; i++) {
                const int r = (first + i) % network.size;
                if (is_due(r)) {
                    turn(r);
                    moved = true;
                }
            }
        }
        if (is_met())
            break;
        const int64_t next_ns = next_event_ns();
        if (next_ns > until_ns)
            return false;
        now_ns = next_ns;
    }
    return true;
}

// ------------------------------------------------------------------------------------------------------------- ranks

// Like bhvd_context_create, but without the progress thread. `adjust` changes the options; it may be NULL.
static void begin_ranks(void (*adjust)(int rank, struct bhvd_context_options *options))
{
    struct bhvd_error error;
    int32_t all[RANKS_MAX];
    now_ns = 1;
    clear_lines();
    void *world = bhvd_inproc_world_create(network.size);
    for (int r = 0; r < network.size; r++)
        all[r] = r;
    for (int r = 0; r < network.size; r++) {
        struct bhvd_context_options options = {.rank = r, .size = network.size, .transport = "inproc", .inproc_world = world,
                                               .fusion_threshold = 1 << 16, .cache_capacity = 16, .timeout_ms = 60000};
        bhvd_context *ctx;
        int id;
        if (adjust)
            adjust(r, &options);
        CHECK_STATUS(context_new(&options, &ctx, &error), BHVD_OK);
        CHECK_STATUS(connections_init(&ctx->exec.connections, &ctx->options, NULL, &error), BHVD_OK);
        connect_lines(&ctx->exec.connections);
        CHECK_STATUS(context_prepare(ctx), BHVD_OK);
        CHECK_STATUS(process_set_add(&ctx->sets, &ctx->exec, all, network.size, false, &id, &error), BHVD_OK);
        ranks[r] = (struct rank){.ctx = ctx};
    }
}

// Handles must have been dropped.
static void end_ranks(void)
{
    void *world = ranks[0].ctx->options.inproc_world;
    for (int r = 0; r < network.size; r++) {
        executor_fail(&ranks[r].ctx->exec, BHVD_ERR_SHUTDOWN, "the end of the test");
        tasks_abort(&ranks[r].ctx->exec);
        atomic_store(&ranks[r].ctx->leaving, true);     // virtual time stands still, so nothing may wait
        bhvd_context_destroy(ranks[r].ctx);
    }
    bhvd_inproc_world_destroy(world);
    clear_lines();
    now_ns = -1;
}

// -------------------------------------------------------------------------------- for tests that post between runs

static bool never(void) { return false; }

// Lets time pass.
__attribute__((unused))
static void pass(int64_t ns)
{
    const int64_t until_ns = now_ns + ns;
    run_until(never, until_ns);
    now_ns = until_ns;
}

// Begins a job of ranks on these hosts, one letter for each rank, with delays that depend on the seed.
__attribute__((unused))
static void begin_job(const char *hosts, uint64_t seed, void (*adjust)(int rank, struct bhvd_context_options *options))
{
    random_state = seed * 0x2545f4914f6cdd1du;
    network = (struct network){.size = (int)strlen(hosts), .room = 1 << 16};
    for (int from = 0; from < network.size; from++) {
        network.host_of[from] = hosts[from] - 'A';
        for (int to = 0; to < from; to++)
            network.delay_ns[from][to] = network.delay_ns[to][from] = MS + (int64_t)draw(40) * MS;
    }
    begin_ranks(adjust);
}

__attribute__((unused))
static struct fault *add_fault(enum fault_kind kind, int rank, int64_t end_ns)
{
    CHECK(network.fault_count < FAULTS_MAX);
    network.faults[network.fault_count] = (struct fault){.kind = kind, .rank = rank, .begin_ns = now_ns, .end_ns = end_ns};
    return &network.faults[network.fault_count++];
}
