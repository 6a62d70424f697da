#include "simulation/simulator.h"

#include <math.h>
#include <stdlib.h>

#include "base/containers.h"

// Overhead of a message: its own header, and per packet the headers of Ethernet, IP and TCP.
enum { HEADER_NBYTES = 16, PACKET_PAYLOAD = 1448, PACKET_OVERHEAD = 66 };

enum event_kind {
    EVENT_FIRST_BYTE,       // of a message, at the receiver's link
    EVENT_CAME,             // completely received
    EVENT_DONE              // a step
};

struct event {
    double time;
    uint64_t number;        // ties in time: the event that was planned first wins
    enum event_kind kind;
    int execution, rank, step;
};

// The state of one step.
struct simulated_step {
    int waits, first, next[STEP_WAITS];     // edges as in the executor
    int mate;                               // of a receive: the peer's send; of a send: the peer's receive
    double time;                            // of a send: when its last byte leaves; of a receive: arrival, -1: not yet
    bool begun;
};

// One rank's part of an execution, from its start to its end.
struct part_of_plan {
    struct schedule schedule;
    struct simulated_step *steps;
    int left;
    double combined;                        // codes that a STEP_COMBINE adds, including its own
};

struct host {
    double out_free, in_free, core_free, done;
    int started;                            // executions
    int over;                               // all executions before this one are over
};

struct simulator {
    const struct simulated *what;
    const struct bhvd_network *network;
    struct host *hosts;
    struct part_of_plan **plans;             // by execution: its ranks' parts; NULL before and after it
    int *over;                              // by execution: ranks that are done with it
    struct event *events;                   // a heap
    size_t count, capacity;
    uint64_t planned, steps;
    bhvd_status status;
};

// --------------------------------------------------------------------------------------------------------------- events

static bool is_before(const struct event *one, const struct event *other)
{
    return one->time < other->time || (one->time == other->time && one->number < other->number);
}

static void plan(struct simulator *s, double time, enum event_kind kind, int execution, int rank, int step)
{
    if (!array_reserve(s->events, s->count, s->capacity, 1024)) {
        s->status = BHVD_ERR_SYSTEM;
        return;
    }
    const struct event event = {time, s->planned++, kind, execution, rank, step};
    size_t at = s->count++;
    for (; at && is_before(&event, &s->events[(at - 1) / 2]); at = (at - 1) / 2)
        s->events[at] = s->events[(at - 1) / 2];
    s->events[at] = event;
}

static struct event next_event(struct simulator *s)
{
    const struct event first = s->events[0], last = s->events[--s->count];
    size_t at = 0;
    for (size_t child; (child = 2 * at + 1) < s->count; at = child) {
        child += child + 1 < s->count && is_before(&s->events[child + 1], &s->events[child]);
        if (!is_before(&s->events[child], &last))
            break;
        s->events[at] = s->events[child];
    }
    s->events[at] = last;
    return first;
}

// ---------------------------------------------------------------------------------------------------------- executions

static void execution_free(struct simulator *s, int execution)
{
    for (int r = 0; s->plans[execution] && r < s->what->size; r++) {
        s->steps -= (uint64_t)s->plans[execution][r].schedule.count;
        schedule_fini(&s->plans[execution][r].schedule);
        free(s->plans[execution][r].steps);
    }
    free(s->plans[execution]);
    s->plans[execution] = NULL;
}

// A segment is received from each peer, and combined once.
static double codes_combined(const struct schedule *schedule)
{
    int receives = 0, combines = 0;
    for (int i = 0; i < schedule->count; i++) {
        receives += schedule->steps[i].kind == STEP_RECEIVE;
        combines += schedule->steps[i].kind == STEP_COMBINE;
    }
    return combines ? 1 + (double)receives / combines : 0;
}

static bool part_init(struct part_of_plan *part)
{
    const struct schedule *schedule = &part->schedule;
    part->left = schedule->count;
    part->combined = codes_combined(schedule);
    part->steps = malloc(((size_t)schedule->count + 1) * sizeof *part->steps);
    if (schedule->failed || !part->steps)
        return false;
    for (int i = 0; i < schedule->count; i++) {
        struct simulated_step *state = &part->steps[i];
        *state = (struct simulated_step){.first = STEP_NONE, .mate = STEP_NONE, .time = -1};
        for (int w = 0; w < STEP_WAITS; w++) {
            const int after = schedule->steps[i].after[w];
            if (after == STEP_NONE)
                continue;
            state->waits++;
            state->next[w] = part->steps[after].first;
            part->steps[after].first = STEP_WAITS * i + w;
        }
    }
    return true;
}

// One rank's messages, ordered by peer and number.
struct message {
    int peer, step;
};

static int compare_messages(const void *one, const void *other)
{
    const struct message *a = one, *b = other;
    return a->peer != b->peer ? (a->peer > b->peer) - (a->peer < b->peer) : (a->step > b->step) - (a->step < b->step);
}

static struct message *messages_of(const struct schedule *schedule, enum step_kind kind, int *count)
{
    struct message *messages = malloc(((size_t)schedule->count + 1) * sizeof *messages);
    *count = 0;
    for (int i = 0; messages && i < schedule->count; i++)
        if (schedule->steps[i].kind == kind)
            messages[(*count)++] = (struct message){schedule->steps[i].peer, i};
    if (messages)
        qsort(messages, (size_t)*count, sizeof *messages, compare_messages);
    return messages;
}

// Unmatched messages have no mate: they never arrive, and the receiver waits forever.
static bool match(struct part_of_plan *plans, int size)
{
    struct message **receives = calloc((size_t)size, sizeof *receives);
    int *counts = calloc((size_t)size, sizeof *counts), *at = calloc((size_t)size, sizeof *at);
    bool ok = receives && counts && at;
    for (int r = 0; r < size && ok; r++)
        ok = (receives[r] = messages_of(&plans[r].schedule, STEP_RECEIVE, &counts[r]));
    // Senders are in the order in which receivers are sorted, so one pass over each list is enough.
    for (int r = 0; r < size && ok && at && counts; r++) {
        int count;
        struct message *sends = messages_of(&plans[r].schedule, STEP_SEND, &count);
        ok = sends;
        for (int i = 0; ok && i < count; i++) {
            const int to = sends[i].peer;
            while (at[to] < counts[to] && receives[to][at[to]].peer < r)
                at[to]++;
            if (at[to] == counts[to] || receives[to][at[to]].peer != r)
                continue;
            const int receive = receives[to][at[to]++].step;
            plans[r].steps[sends[i].step].mate = receive;
            plans[to].steps[receive].mate = sends[i].step;
        }
        free(sends);
    }
    for (int r = 0; receives && r < size; r++)
        free(receives[r]);
    free(receives);
    free(counts);
    free(at);
    return ok;
}

static void write_execution(struct simulator *s, int execution)
{
    const int size = s->what->size;
    struct part_of_plan *plans = s->plans[execution] = calloc((size_t)size, sizeof *plans);
    if (!plans) {
        s->status = BHVD_ERR_SYSTEM;
        return;
    }
    for (int r = 0; r < size && !s->status; r++) {
        schedule_init(&plans[r].schedule, size, r);
        s->what->write(s->what->arg, execution, &plans[r].schedule);
        s->steps += (uint64_t)plans[r].schedule.count;
        // All ranks have about as many steps, so the limit is detected before memory runs out.
        if (s->steps + (uint64_t)plans[r].schedule.count * (uint64_t)(size - r - 1) > SIMULATOR_STEPS_MAX)
            s->status = BHVD_ERR_UNSUPPORTED;
        else if (!part_init(&plans[r]))
            s->status = BHVD_ERR_SYSTEM;
    }
    if (!s->status && !match(plans, size))
        s->status = BHVD_ERR_SYSTEM;
}

// ---------------------------------------------------------------------------------------------------------------- steps

static double latency(const struct bhvd_network *network, int rank, int peer)
{
    const bool is_slow = rank == network->slow_rank || peer == network->slow_rank;
    return is_slow ? network->slow_latency_s : network->latency_s;
}

static double on_line(const struct bhvd_network *network, int rank, size_t nbytes)
{
    const double payload = (double)nbytes + HEADER_NBYTES, packets = ceil(payload / PACKET_PAYLOAD);
    return (payload + packets * PACKET_OVERHEAD) /
           (rank == network->slow_rank ? network->slow_bytes_per_s : network->bytes_per_s);
}

static double on_core(const struct bhvd_network *network, const struct step *step, const struct part_of_plan *part)
{
    const double nbytes = (double)step->nbytes, values = (double)step->values.nbytes;
    const bool is_coded = step->nbytes != step->values.nbytes;
    const double encode = is_coded ? network->encode_s_per_byte : network->load_s_per_byte;
    const double decode = is_coded ? network->decode_s_per_byte : network->reduce_s_per_byte;
    switch (step->kind) {
    case STEP_SEND:
    case STEP_RECEIVE: return network->message_s;
    case STEP_LOAD: return nbytes * network->load_s_per_byte;
    case STEP_REDUCE: return nbytes * network->reduce_s_per_byte;
    case STEP_SCALE: return nbytes * network->scale_s_per_byte;
    case STEP_STORE: return nbytes * network->store_s_per_byte;
    case STEP_COPY: return nbytes * network->copy_s_per_byte;
    case STEP_ENCODE: return values * encode;
    case STEP_REENCODE: return values * (part->schedule.size * decode + encode);
    case STEP_DECODE: return values * decode;
    case STEP_COMBINE: return values * decode * part->combined;
    default: return 0;
    }
}

static double use_core(struct simulator *s, int rank, double now, double seconds)
{
    struct host *host = &s->hosts[rank];
    host->core_free = fmax(host->core_free, now) + seconds;
    return host->core_free;
}

static void begin(struct simulator *s, int execution, int rank, int index, double now)
{
    struct part_of_plan *part = &s->plans[execution][rank];
    const struct step *step = &part->schedule.steps[index];
    struct host *host = &s->hosts[rank];
    struct simulated_step *state = &part->steps[index];
    const double core = on_core(s->network, step, part);
    state->begun = true;
    if (step->kind == STEP_SEND) {
        const double start = fmax(host->out_free, use_core(s, rank, now, core));
        host->out_free = state->time = start + on_line(s->network, rank, step->nbytes);
        plan(s, state->time, EVENT_DONE, execution, rank, index);
        if (state->mate != STEP_NONE)
            plan(s, start + latency(s->network, rank, step->peer), EVENT_FIRST_BYTE, execution, step->peer, state->mate);
    } else if (step->kind != STEP_RECEIVE || state->time >= 0) {
        plan(s, use_core(s, rank, now, core), EVENT_DONE, execution, rank, index);
    }
}

static void first_byte(struct simulator *s, const struct event *event)
{
    struct part_of_plan *plans = s->plans[event->execution], *part = &plans[event->rank];
    const struct step *step = &part->schedule.steps[event->step];
    struct host *host = &s->hosts[event->rank];
    const double line = fmax(host->in_free, event->time) + on_line(s->network, event->rank, step->nbytes);
    const double left = plans[step->peer].steps[part->steps[event->step].mate].time + latency(s->network, event->rank, step->peer);
    host->in_free = fmax(line, left);
    plan(s, host->in_free, EVENT_CAME, event->execution, event->rank, event->step);
}

static void came(struct simulator *s, const struct event *event)
{
    struct simulated_step *state = &s->plans[event->execution][event->rank].steps[event->step];
    state->time = event->time;
    if (state->begun)
        plan(s, use_core(s, event->rank, event->time, s->network->message_s), EVENT_DONE, event->execution, event->rank,
             event->step);
}

static void start(struct simulator *s, int rank, double now);

static void part_over(struct simulator *s, int execution, int rank, double now)
{
    struct host *host = &s->hosts[rank];
    host->done = now;
    while (host->over < host->started && (!s->plans[host->over] || s->plans[host->over][rank].left == 0))
        host->over++;
    if (++s->over[execution] == s->what->size)
        execution_free(s, execution);
    start(s, rank, now);
}

// Starts the executions that the window allows.
static void start(struct simulator *s, int rank, double now)
{
    struct host *host = &s->hosts[rank];
    while (!s->status && host->started < s->what->count &&
           host->started - s->what->window(s->what->arg, host->started) < host->over) {
        const int execution = host->started++;
        if (!s->plans[execution])
            write_execution(s, execution);
        if (s->status)
            return;
        struct part_of_plan *part = &s->plans[execution][rank];
        const int count = part->schedule.count;
        for (int i = 0; i < count; i++)
            if (part->steps[i].waits == 0)
                begin(s, execution, rank, i, now);
        if (count == 0) {
            part_over(s, execution, rank, now);
            return;                         // part_over has continued from there
        }
    }
}

static void done(struct simulator *s, const struct event *event)
{
    struct part_of_plan *part = &s->plans[event->execution][event->rank];
    part->left--;
    for (int edge = part->steps[event->step].first; edge != STEP_NONE;) {
        struct simulated_step *waiting = &part->steps[edge / STEP_WAITS];
        if (--waiting->waits == 0)
            begin(s, event->execution, event->rank, edge / STEP_WAITS, event->time);
        edge = waiting->next[edge % STEP_WAITS];
    }
    if (part->left == 0)
        part_over(s, event->execution, event->rank, event->time);
}

bhvd_status simulate(const struct simulated *simulated, const struct bhvd_network *network, double *seconds)
{
    const size_t size = (size_t)simulated->size, count = (size_t)simulated->count;
    struct simulator s = {.what = simulated, .network = network};
    s.hosts = calloc(size, sizeof *s.hosts);
    s.plans = calloc(count + 1, sizeof *s.plans);
    s.over = calloc(count + 1, sizeof *s.over);
    if (!s.hosts || !s.plans || !s.over)
        s.status = BHVD_ERR_SYSTEM;
    for (int r = 0; r < simulated->size && !s.status; r++)
        start(&s, r, 0);
    while (s.count && !s.status) {
        const struct event event = next_event(&s);
        if (event.kind == EVENT_FIRST_BYTE)
            first_byte(&s, &event);
        else if (event.kind == EVENT_CAME)
            came(&s, &event);
        else
            done(&s, &event);
    }
    for (int r = 0; r < simulated->size && !s.status; r++) {
        seconds[r] = s.hosts[r].done;
        if (s.hosts[r].over < simulated->count)
            s.status = BHVD_ERR_MISMATCH;
    }
    for (size_t i = 0; s.plans && i < count; i++)
        execution_free(&s, (int)i);
    free(s.hosts);
    free(s.plans);
    free(s.over);
    free(s.events);
    return s.status;
}
