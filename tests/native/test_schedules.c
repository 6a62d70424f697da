// Verifies schedules (executor/schedule.h): records the schedules of all ranks, and checks the invariants of a correct collective.
//
//     match      the k-th send of a to b has the size of the k-th receive of b from a; steps wait for earlier ones only;
//                offsets lie within their buffers
//     deadlock   a message moves only when its send and its receive have begun. Run twice: in the order of the numbers, with any
//                local step next; and in the order in which an executor posts them, over data channels that keep their order
//     values     every element of every rank counted exactly once, prescaled and scaled once, in the same order on all ranks
//     hosts      the members of a host write the same steps within it, in the same order; it moves data when all have begun it
//     races      of two steps of a rank that touch the same bytes, one writing, one is over before the other begins, for any
//                delays: ordered by waits, and by messages (received data has been sent before, and was read completely)
//
// Values are symbolic. A value of `cell` bytes is a pair of hashes: the sum of the added values, and the tree of additions. So a
// vector of many segments has few cells. The last tests check the verifier: it notices each of many mutations.
#include "check.h"

#include "collective/collectives.h"
#include "collective/shards.h"
#include "primitive/coded.h"

enum { SEGMENT = SCHEDULE_SEGMENT };

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
enum { IS_SANITIZED = true };
#else
enum { IS_SANITIZED = false };
#endif

// ---------------------------------------------------------------------------------------------------------------- cases

// The last four are primitives, whose codes are as long here as the values. Peers: those of a ring.
enum kind { RING, DOUBLING, HALVING, HIERARCHICAL, ALLGATHER, ALLGATHER_DOUBLING, ALLTOALL, REDUCESCATTER, REDUCESCATTER_LOADS,
            BROADCAST, OWNERS, EVERYONE, PEERS, PEERS_IN_PLACE };

static const char *const KIND_NAMES[] = {"ring", "doubling", "halving", "hierarchical", "allgather", "allgather (doubling)",
                                         "alltoall", "reducescatter", "reducescatter (loads)", "broadcast", "owners", "everyone", "peers",
                                         "peers (in place)"};

struct job {
    enum kind kind;
    int n, root;
    size_t cell;            // bytes; an element in the schedules
    size_t nbytes;          // allreduce, broadcast
    bool chain;             // broadcast
    const char *hosts;      // hierarchical: a letter for each rank's host; the ranks of a host are neighbors
    enum allreduce_path path;
    size_t in_flight;
    size_t *part;           // allgather, reducescatter: each rank's size
    size_t *sent;           // alltoall: [from * n + to]
};

enum { TENSOR_MEMORY = BUFFER_COUNT, MEMORY_COUNT };    // the memory that a load reads and a store writes

static bool is_of_codes(const struct job *job) { return job->kind >= OWNERS; }
static bool has_peers(const struct job *job) { return job->kind >= PEERS; }
static bool is_allreduce(const struct job *job) { return job->kind <= HIERARCHICAL; }
static bool is_allgather(const struct job *job) { return job->kind == ALLGATHER || job->kind == ALLGATHER_DOUBLING; }
static bool is_reducescatter(const struct job *job) { return job->kind == REDUCESCATTER || job->kind == REDUCESCATTER_LOADS; }

static size_t sum_of(const size_t *values, int count)
{
    size_t sum = 0;
    for (int i = 0; i < count; i++)
        sum += values[i];
    return sum;
}

// Two neighbors, or one.
static int neighbors_of(const struct job *job, int rank, int peers[2])
{
    peers[0] = (rank + job->n - 1) % job->n;
    peers[1] = (rank + 1) % job->n;
    return job->n > 2 ? 2 : job->n - 1;
}

static struct codes codes_of(const struct job *job, int rank)
{
    const uint64_t chunks = job->kind == OWNERS ? (uint64_t)job->n : 1;
    struct codes codes = {.pattern = job->kind == OWNERS     ? CODES_TO_OWNERS
                                     : job->kind == EVERYONE ? CODES_TO_ALL
                                                             : CODES_TO_PEERS,
                          .cut = {job->nbytes / job->cell, chunks, SEGMENT / job->cell}, .element = job->cell};
    codes.peers.count = neighbors_of(job, rank, codes.peers.index);
    coded_in_scratch(&codes, job->n, &(struct network_cost){0});
    if (job->kind == PEERS_IN_PLACE) {
        codes.encodes = false;
        codes.own = (struct code_lay){INPUT_BUFFER, 0, 0, SEGMENT};
    }
    return codes;
}

static void write_codes(const struct job *job, int rank, struct schedule *schedule)
{
    const struct codes codes = codes_of(job, rank);
    coded_schedule(schedule, &codes);
}

enum { SHARD = 4096, HOSTS_MAX = 8 };

// Where each host's ranks begin, for struct hierarchy.
static struct hierarchy hierarchy_of(const struct job *job, int rank, int first[HOSTS_MAX + 1], int *members)
{
    struct hierarchy h = {.first = first, .members = members, .shards = job->n};
    for (int r = 0; r < job->n; r++) {
        members[r] = r;
        if (r == 0 || job->hosts[r] != job->hosts[r - 1])
            first[h.hosts++] = r;
        h.host = r == rank ? h.hosts - 1 : h.host;
    }
    first[h.hosts] = job->n;
    for (int host = 0; host < h.hosts; host++)
        h.shards = hierarchy_members_of(&h, host) < h.shards ? hierarchy_members_of(&h, host) : h.shards;
    h.index = rank - first[h.host];
    return h;
}

struct shards_of_job {
    struct shards shards;
    const struct job *job;
};

// A shorter shard takes another path.
static void write_shard(const struct shards *x, struct schedule *schedule, struct byte_range mine)
{
    const struct job *job = ((const struct shards_of_job *)x)->job;
    const enum allreduce_path other = job->path == ALLREDUCE_HALVING ? ALLREDUCE_RING : (enum allreduce_path)(job->path + 1);
    allreduce_schedule(schedule, mine.nbytes == SHARD ? job->path : other, NULL, mine.nbytes, job->cell);
}

static bool is_shared(const struct step *step)
{
    return step->kind == STEP_REDUCE_WITHIN || step->kind == STEP_DISTRIBUTE_WITHIN;
}

// Peers become ranks, and the order of steps within the host becomes waits.
static void write_two_levels(const struct job *job, int rank, struct schedule *schedule)
{
    int first[HOSTS_MAX + 1], *members = malloc((size_t)job->n * sizeof *members), before = STEP_NONE;
    const struct hierarchy h = hierarchy_of(job, rank, first, members);
    schedule->size = h.hosts;
    schedule->rank = h.host;
    static const struct shards_work work = {.write = write_shard};
    size_t scratch[SHARDS_IN_FLIGHT];
    const struct shards_of_job x = {{.h = &h, .work = &work, .nbytes = job->nbytes, .shard_nbytes = SHARD,
                                     .in_flight = job->in_flight, .scratch = scratch}, job};
    schedule_shards(schedule, &x.shards);
    schedule->rank = rank;
    for (int i = 0; i < schedule->count; i++) {
        struct step *step = &schedule->steps[i];
        if (step->kind <= STEP_RECEIVE)
            step->peer = hierarchy_member(&h, step->peer, h.index);
        if (is_shared(step)) {
            step->after[1] = before;
            before = i;
        }
    }
    free(members);
}

static void write_down(const struct job *job, int rank, struct schedule *schedule)
{
    const int n = job->n;
    size_t *received;
    schedule_init(schedule, n, rank);
    switch (job->kind) {
    case RING:
        schedule_allreduce_ring(schedule, job->nbytes, job->cell);
        break;
    case DOUBLING:
        schedule_allreduce_doubling(schedule, job->nbytes);
        break;
    case HALVING:
        schedule_allreduce_halving(schedule, job->nbytes, job->cell);
        break;
    case HIERARCHICAL:
        write_two_levels(job, rank, schedule);
        break;
    case ALLGATHER:
        schedule_allgather_direct(schedule, job->part);
        break;
    case ALLGATHER_DOUBLING:
        schedule_allgather_bruck(schedule, job->part);
        break;
    case ALLTOALL:
        received = malloc((size_t)n * sizeof *received);
        for (int i = 0; i < n; i++)
            received[i] = job->sent[i * n + rank];
        schedule_alltoall(schedule, job->sent + rank * n, received);
        free(received);
        break;
    case BROADCAST:
        schedule_broadcast(schedule, job->root, job->nbytes, job->chain);
        break;
    case OWNERS:
    case EVERYONE:
    case PEERS:
    case PEERS_IN_PLACE:
        write_codes(job, rank, schedule);
        break;
    default:
        schedule_reducescatter(schedule, job->part, job->kind == REDUCESCATTER_LOADS);
    }
    CHECK(!schedule->failed);
}

// The size in bytes of a buffer by definition; of scratch, as the schedule says.
static size_t buffer_size(const struct job *job, const struct schedule *schedule, int buffer)
{
    const int n = job->n, rank = schedule->rank;
    if (buffer == SCRATCH_BUFFER)
        return schedule->buffer_nbytes[SCRATCH_BUFFER];
    if (is_allreduce(job))
        return buffer == TENSOR_MEMORY || (buffer == FUSION_BUFFER && job->kind != HIERARCHICAL) ? job->nbytes : 0;
    if (is_of_codes(job))
        return buffer == TENSOR_MEMORY || (buffer == INPUT_BUFFER && job->kind == PEERS_IN_PLACE) ? job->nbytes : 0;
    if (job->kind == BROADCAST)
        return buffer == OUTPUT_BUFFER || (buffer == INPUT_BUFFER && rank == job->root) ? job->nbytes : 0;
    if (is_allgather(job))
        return buffer == INPUT_BUFFER ? job->part[rank] : buffer == OUTPUT_BUFFER ? sum_of(job->part, n) : 0;
    if (job->kind == ALLTOALL) {
        size_t sum = 0;
        for (int i = 0; i < n && buffer == OUTPUT_BUFFER; i++)
            sum += job->sent[i * n + rank];
        return buffer == INPUT_BUFFER ? sum_of(job->sent + rank * n, n) : sum;
    }
    if (buffer == FUSION_BUFFER && job->kind != REDUCESCATTER_LOADS)
        return 0;
    return buffer == OUTPUT_BUFFER ? job->part[rank] : sum_of(job->part, n);
}

// ---------------------------------------------------------------------------------------------------------------- world

struct value {
    uint64_t sum, tree;
};

struct world {
    const struct job *job;
    int n;
    struct schedule *schedules;
    int *first;                             // index of each rank's first step among all; [n]: the number of steps
    int *rank_of;
    int *mate;                              // a send's receive, a receive's send; of a step within a host: the next member's
    size_t (*base)[MEMORY_COUNT];           // start of each rank's buffers in its memory, in cells
    size_t (*size)[MEMORY_COUNT];           // cells
    struct value **memory;
    int *order;                             // nodes in the order of a run: 2 step: it begins to touch bytes; 2 step + 1: it is over
    int ordered;
};

// Formats a complaint, in one static buffer.
__attribute__((format(printf, 1, 2)))
static const char *complain(const char *format, ...)
{
    static char text[300];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    return text;
}

static uint64_t random_state;

static uint64_t mix(uint64_t x)
{
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

static int random_below(int limit)
{
    random_state += 0x9e3779b97f4a7c15u;
    return (int)(mix(random_state) % (uint64_t)limit);
}

static struct step *step_at(const struct world *w, int g)
{
    const int rank = w->rank_of[g];
    return &w->schedules[rank].steps[g - w->first[rank]];
}

static const char *name_of(const struct world *w, int g)
{
    static const char *const names[] = {"send", "receive", "load", "reduce", "scale", "store", "copy", "nothing",
                                        "reduce within", "distribute within",
                                        "encode", "reencode", "decode", "combine"};
    static char text[2][80];
    static int turn;
    const struct step *step = step_at(w, g);
    char *to = text[turn++ % 2];
    snprintf(to, sizeof text[0], "step %d (%s, peer %d) of rank %d", g - w->first[w->rank_of[g]], names[step->kind], step->peer,
             w->rank_of[g]);
    return to;
}

static void world_open(struct world *w, const struct job *job)
{
    *w = (struct world){.job = job, .n = job->n};
    w->schedules = malloc((size_t)w->n * sizeof *w->schedules);
    w->first = malloc(((size_t)w->n + 1) * sizeof *w->first);
    w->base = calloc((size_t)w->n, sizeof *w->base);
    w->size = calloc((size_t)w->n, sizeof *w->size);
    w->memory = calloc((size_t)w->n, sizeof *w->memory);
    w->first[0] = 0;
    for (int r = 0; r < w->n; r++) {
        write_down(job, r, &w->schedules[r]);
        w->first[r + 1] = w->first[r] + w->schedules[r].count;
    }
    const size_t count = (size_t)w->first[w->n] + 1;
    w->rank_of = malloc(count * sizeof *w->rank_of);
    w->mate = malloc(count * sizeof *w->mate);
    w->order = malloc(2 * count * sizeof *w->order);
    for (int r = 0; r < w->n; r++)
        for (int g = w->first[r]; g < w->first[r + 1]; g++)
            w->rank_of[g] = r;
}

static void world_close(struct world *w)
{
    for (int r = 0; r < w->n; r++) {
        schedule_fini(&w->schedules[r]);
        free(w->memory[r]);
    }
    free(w->schedules);
    free(w->first);
    free(w->rank_of);
    free(w->mate);
    free(w->base);
    free(w->size);
    free(w->memory);
    free(w->order);
}

// Places buffers one after the other in one memory, except those that may overlap: the tests assume that they do.
static const char *lay_out(struct world *w)
{
    const struct job *job = w->job;
    for (int r = 0; r < w->n; r++) {
        size_t end = 0;
        for (int s = 0; s < MEMORY_COUNT; s++) {
            const size_t nbytes = buffer_size(job, &w->schedules[r], s);
            if (nbytes % job->cell)
                return complain("rank %d: buffer %d has %zu bytes, cells of %zu", r, s, nbytes, job->cell);
            w->size[r][s] = nbytes / job->cell;
            w->base[r][s] = end;
            end += w->size[r][s];
        }
        if (is_reducescatter(job)) {
            w->base[r][TENSOR_MEMORY] = w->base[r][INPUT_BUFFER];
            w->base[r][OUTPUT_BUFFER] = w->base[r][INPUT_BUFFER];
        } else if (job->kind == BROADCAST && r == job->root) {
            w->base[r][INPUT_BUFFER] = w->base[r][OUTPUT_BUFFER];
        } else if (job->kind == PEERS_IN_PLACE) {
            w->base[r][INPUT_BUFFER] = w->base[r][TENSOR_MEMORY];
        } else if (is_allgather(job)) {
            w->base[r][INPUT_BUFFER] = w->base[r][OUTPUT_BUFFER] + sum_of(job->part, r) / job->cell;
        }
        free(w->memory[r]);
        w->memory[r] = malloc((end + 1) * sizeof **w->memory);
    }
    return NULL;
}

// ---------------------------------------------------------------------------------------------------------------- match

// A range that a step reads or writes, in cells of its rank's memory.
struct touched {
    size_t begin, count;
    bool writes;
};

static struct touched touch(const struct world *w, int rank, int buffer, size_t at, size_t nbytes, bool writes)
{
    return (struct touched){w->base[rank][buffer] + at / w->job->cell, nbytes / w->job->cell, writes};
}

// How many codes a step reads from `from` on, in constant distances; there is none for rank `left_out`. Returns the bytes from
// the start of the first to the end of the last.
static size_t codes_read(const struct world *w, int g, int *count, size_t *each, int *left_out)
{
    const struct job *job = w->job;
    const int r = w->rank_of[g];
    int peers[2];
    *each = codes_of(job, r).received.each;
    *count = has_peers(job) ? neighbors_of(job, r, peers) : w->n;
    *left_out = has_peers(job) ? -1 : r;
    const int last = *left_out == *count - 1 ? *count - 2 : *count - 1;
    return last < 0 ? 0 : (size_t)last * *each + step_at(w, g)->nbytes;
}

static int touched_by(const struct world *w, int g, struct touched out[3])
{
    const struct step *step = step_at(w, g);
    const int r = w->rank_of[g];
    int count, left_out;
    size_t each;
    const struct touched to = touch(w, r, step->to.buffer, step->to.offset, step->nbytes, true);
    const struct touched from = touch(w, r, step->from.buffer, step->from.offset, step->nbytes, false);
    out[0] = to;
    out[1] = from;
    switch (step->kind) {
    case STEP_SEND:
        out[0] = from;
        return 1;
    case STEP_RECEIVE:
    case STEP_SCALE:
        return 1;
    case STEP_LOAD:
        out[1] = touch(w, r, TENSOR_MEMORY, step->to.offset, step->nbytes, false);
        return 2;
    case STEP_REDUCE:
        out[2] = touch(w, r, step->other.buffer, step->other.offset, step->nbytes, false);
        return 3;
    case STEP_STORE:
        out[0] = touch(w, r, TENSOR_MEMORY, step->from.offset, step->nbytes, true);
        return 2;
    case STEP_COPY:
        return to.begin == from.begin ? 0 : 2;          // already in place
    case STEP_REDUCE_WITHIN:
    case STEP_ENCODE:
        out[1] = touch(w, r, TENSOR_MEMORY, step->values.begin, step->values.nbytes, false);
        return 2;
    case STEP_DISTRIBUTE_WITHIN:
    case STEP_DECODE:
        out[0] = touch(w, r, TENSOR_MEMORY, step->values.begin, step->values.nbytes, true);
        return 2;
    case STEP_REENCODE:
    case STEP_COMBINE:
        if (step->kind == STEP_COMBINE)
            out[0] = touch(w, r, TENSOR_MEMORY, step->values.begin, step->values.nbytes, true);
        out[1] = touch(w, r, step->from.buffer, step->from.offset, codes_read(w, g, &count, &each, &left_out), false);
        out[2] = touch(w, r, step->other.buffer, step->other.offset, step->nbytes, false);
        return 3;
    default:
        return 0;
    }
}

static bool is_within(const struct world *w, int rank, struct location location, size_t nbytes)
{
    return location.offset % w->job->cell == 0 && location.offset + nbytes <= w->size[rank][location.buffer] * w->job->cell;
}

static const char *check_steps(struct world *w)
{
    for (int g = 0; g < w->first[w->n]; g++) {
        const struct step *step = step_at(w, g);
        const int r = w->rank_of[g];
        for (int i = 0; i < STEP_WAITS; i++)
            if (step->after[i] != STEP_NONE && (step->after[i] < 0 || step->after[i] >= g - w->first[r]))
                return complain("%s waits for %d", name_of(w, g), step->after[i]);
        if (step->nbytes % w->job->cell || (step->nbytes && step->kind != STEP_NOOP &&
            !(is_within(w, r, step->to, step->nbytes) && is_within(w, r, step->from, step->nbytes) &&
              is_within(w, r, step->other, step->nbytes))))
            return complain("%s: %zu bytes leave their buffer", name_of(w, g), step->nbytes);
        if (step->kind > STEP_RECEIVE)
            continue;
        if (step->peer < 0 || step->peer >= w->n || step->peer == r)
            return complain("%s: no such peer", name_of(w, g));
        if (step->nbytes > SEGMENT)
            return complain("%s: a message of %zu bytes", name_of(w, g), step->nbytes);
    }
    return NULL;
}

static int next_shared(const struct world *w, int rank, int g)
{
    while (g < w->first[rank + 1] && !is_shared(step_at(w, g)))
        g++;
    return g;
}

// The next rank of the same host.
static int neighbor(const struct world *w, int rank)
{
    const char *hosts = w->job->hosts;
    if (rank + 1 < w->n && hosts[rank + 1] == hosts[rank])
        return rank + 1;
    while (rank && hosts[rank - 1] == hosts[rank])
        rank--;
    return rank;
}

static const char *check_hosts(struct world *w)
{
    for (int r = 0; r < w->n && w->job->hosts; r++) {
        const int next = neighbor(w, r);
        int g = next_shared(w, r, w->first[r]), theirs = next_shared(w, next, w->first[next]);
        for (; g < w->first[r + 1] && theirs < w->first[next + 1];
             g = next_shared(w, r, g + 1), theirs = next_shared(w, next, theirs + 1)) {
            const struct step *one = step_at(w, g), *other = step_at(w, theirs);
            w->mate[g] = theirs;
            if (one->kind != other->kind || one->number != other->number || one->values.begin != other->values.begin ||
                one->values.nbytes != other->values.nbytes)
                return complain("%s does not fit %s", name_of(w, g), name_of(w, theirs));
        }
        if (g < w->first[r + 1] || theirs < w->first[next + 1])
            return complain("ranks %d and %d differ in their number of steps within the host", r, next);
    }
    return NULL;
}

static const char *check_match(struct world *w)
{
    const size_t pairs = (size_t)w->n * (size_t)w->n;
    int *head = malloc(pairs * sizeof *head), *tail = malloc(pairs * sizeof *tail);
    int *next = malloc(((size_t)w->first[w->n] + 1) * sizeof *next);
    const char *complaint = NULL;
    for (size_t i = 0; i < pairs; i++)
        head[i] = STEP_NONE;
    for (int g = 0; g < w->first[w->n]; g++) {
        const struct step *step = step_at(w, g);
        const size_t pair = (size_t)w->rank_of[g] * (size_t)w->n + (size_t)step->peer;
        w->mate[g] = next[g] = STEP_NONE;
        if (step->kind != STEP_SEND)
            continue;
        if (head[pair] == STEP_NONE)
            head[pair] = g;
        else
            next[tail[pair]] = g;
        tail[pair] = g;
    }
    for (int g = 0; g < w->first[w->n] && !complaint; g++) {
        const struct step *step = step_at(w, g);
        if (step->kind != STEP_RECEIVE)
            continue;
        const size_t pair = (size_t)step->peer * (size_t)w->n + (size_t)w->rank_of[g];
        const int send = head[pair];
        if (send == STEP_NONE || step_at(w, send)->nbytes != step->nbytes) {
            complaint = send == STEP_NONE ? complain("%s: nobody sends it", name_of(w, g))
                                          : complain("%s of %zu bytes: %s sends %zu", name_of(w, g), step->nbytes,
                                                     name_of(w, send), step_at(w, send)->nbytes);
        } else {
            head[pair] = next[send];
            w->mate[g] = send;
            w->mate[send] = g;
        }
    }
    for (int g = 0; g < w->first[w->n] && !complaint; g++)
        if (step_at(w, g)->kind == STEP_SEND && w->mate[g] == STEP_NONE)
            complaint = complain("%s: nobody receives it", name_of(w, g));
    free(head);
    free(tail);
    free(next);
    return complaint;
}

// --------------------------------------------------------------------------------------------------------------- values

static const uint64_t PRESCALE = 3, POSTSCALE = 5;      // odd: invertible modulo 2^64

static struct value value_of(int rank, size_t index)
{
    const uint64_t hash = mix((uint64_t)(rank + 1) << 40 | (index + 1));
    return (struct value){hash, mix(hash)};
}

static struct value added(struct value one, struct value other)
{
    return (struct value){one.sum + other.sum, mix(one.tree + 3 * mix(other.tree + 1))};
}

static struct value scaled(struct value value, uint64_t factor)
{
    return (struct value){value.sum * factor, mix(value.tree + factor)};
}

static struct value *at(const struct world *w, int rank, int buffer, size_t nbytes)
{
    return w->memory[rank] + w->base[rank][buffer] + nbytes / w->job->cell;
}

static void fill(struct world *w)
{
    for (int r = 0; r < w->n; r++) {
        for (int s = 0; s < MEMORY_COUNT; s++)          // garbage, all values different
            for (size_t i = 0; i < w->size[r][s]; i++)
                at(w, r, s, 0)[i] = value_of(-2 - r, i * MEMORY_COUNT + (size_t)s);
        const int source = is_allreduce(w->job) || is_of_codes(w->job) ? TENSOR_MEMORY : INPUT_BUFFER;
        for (size_t i = 0; i < w->size[r][source]; i++)
            at(w, r, source, 0)[i] = value_of(r, i);
    }
}

// The sum of cell i of all codes that the step reads: in rank order, or first its own, then those of the peers.
static struct value sum_of_codes(const struct world *w, int g, size_t i)
{
    const struct step *step = step_at(w, g);
    const int r = w->rank_of[g];
    int count, left_out;
    size_t each;
    codes_read(w, g, &count, &each, &left_out);
    const struct value own = at(w, r, step->other.buffer, step->other.offset)[i];
    struct value sum = own;
    for (int k = 0; k < count; k++) {
        const struct value value = k == left_out ? own : at(w, r, step->from.buffer, step->from.offset + (size_t)k * each)[i];
        sum = k == 0 && left_out >= 0 ? value : added(sum, value);
    }
    return scaled(sum, POSTSCALE);
}

// A step within the host, of all its members.
static void act_within(const struct world *w, int g)
{
    int first[HOSTS_MAX + 1], *members = malloc((size_t)w->n * sizeof *members), one = g;
    do {
        const struct step *step = step_at(w, one);
        const int r = w->rank_of[one];
        const struct hierarchy h = hierarchy_of(w->job, r, first, members);
        const size_t begin = step->values.begin + hierarchy_shard(&h, step->values.nbytes, h.index).begin;
        struct value *shard = at(w, r, step->to.buffer, step->to.offset);
        for (int member = first[h.host]; member < first[h.host + 1]; member++)
            for (size_t i = 0; i < step->nbytes / w->job->cell; i++) {
                struct value *value = &at(w, member, TENSOR_MEMORY, begin)[i];
                if (step->kind == STEP_DISTRIBUTE_WITHIN)
                    *value = shard[i];
                else
                    shard[i] = member == first[h.host] ? scaled(*value, PRESCALE) : added(shard[i], scaled(*value, PRESCALE));
            }
        one = w->mate[one];
    } while (one != g);
    free(members);
}

static void act(const struct world *w, int g)
{
    const struct step *step = step_at(w, g);
    const int r = w->rank_of[g];
    struct value *to = at(w, r, step->to.buffer, step->to.offset), *from = at(w, r, step->from.buffer, step->from.offset);
    const struct value *other = at(w, r, step->other.buffer, step->other.offset);
    for (size_t i = 0; i < step->nbytes / w->job->cell; i++) {
        if (step->kind == STEP_LOAD)
            to[i] = scaled(at(w, r, TENSOR_MEMORY, step->to.offset)[i], PRESCALE);
        else if (step->kind == STEP_REDUCE)
            to[i] = added(from[i], other[i]);
        else if (step->kind == STEP_SCALE)
            to[i] = scaled(to[i], POSTSCALE);
        else if (step->kind == STEP_STORE)
            at(w, r, TENSOR_MEMORY, step->from.offset)[i] = from[i];
        else if (step->kind == STEP_COPY)
            to[i] = from[i];
        else if (step->kind == STEP_ENCODE)
            to[i] = scaled(at(w, r, TENSOR_MEMORY, step->values.begin)[i], PRESCALE);
        else if (step->kind == STEP_DECODE)
            at(w, r, TENSOR_MEMORY, step->values.begin)[i] = from[i];
        else if (step->kind == STEP_REENCODE)
            to[i] = sum_of_codes(w, g, i);
        else if (step->kind == STEP_COMBINE)
            at(w, r, TENSOR_MEMORY, step->values.begin)[i] = sum_of_codes(w, g, i);
        else if (step->kind == STEP_RECEIVE)
            to[i] = at(w, step->peer, step_at(w, w->mate[g])->from.buffer, step_at(w, w->mate[g])->from.offset)[i];
    }
}

// The expected value of element `index` of this rank's result; for sums only the field `sum`.
static struct value expected(const struct world *w, int rank, size_t index)
{
    const struct job *job = w->job;
    const size_t cell = job->cell;
    if (job->kind == BROADCAST)
        return value_of(job->root, index);
    if (is_allgather(job) || job->kind == ALLTOALL) {
        size_t before = 0, size;
        for (int i = 0;; i++, before += size) {
            size = (is_allgather(job) ? job->part[i] : job->sent[i * w->n + rank]) / cell;
            if (index < before + size)
                return value_of(i, index - before + (is_allgather(job) ? 0 : sum_of(job->sent + i * w->n, rank) / cell));
        }
    }
    struct value sum = {0, 0};
    const size_t begin = is_reducescatter(job) ? sum_of(job->part, rank) / cell : 0;
    int peers[2];
    const int count = has_peers(job) ? neighbors_of(job, rank, peers) : w->n;
    if (has_peers(job))
        sum = value_of(rank, index);
    for (int r = 0; r < count; r++)
        sum.sum += value_of(has_peers(job) ? peers[r] : r, begin + index).sum;
    sum.sum *= POSTSCALE * (job->kind == REDUCESCATTER || job->kind == PEERS_IN_PLACE ? 1 : PRESCALE);
    return sum;
}

static const char *check_result(const struct world *w, const struct value *want, int rank, int buffer)
{
    for (size_t i = 0; i < w->size[rank][buffer]; i++) {
        const struct value found = at(w, rank, buffer, 0)[i];
        if (found.sum != want[i].sum)
            return complain("rank %d: element %zu is not what it should be", rank, i);
        if (is_reducescatter(w->job) || has_peers(w->job))
            continue;
        const struct value same = is_allreduce(w->job) || is_of_codes(w->job) ? at(w, 0, buffer, 0)[i] : want[i];
        if (found.tree != same.tree)
            return complain("rank %d: element %zu was added up in another order than on rank 0", rank, i);
    }
    return NULL;
}

// Checks the tensors, and the vector, which is the tensor if there is only one.
static const char *check_values(const struct world *w)
{
    const char *complaint = NULL;
    struct value *want = NULL;
    for (int r = 0; r < w->n && !complaint; r++) {
        const int buffer = is_allreduce(w->job) || is_of_codes(w->job) ? TENSOR_MEMORY : OUTPUT_BUFFER;
        if (r == 0 || !is_allreduce(w->job)) {
            free(want);
            want = malloc((w->size[r][buffer] + 1) * sizeof *want);
            for (size_t i = 0; i < w->size[r][buffer]; i++)
                want[i] = expected(w, r, i);
        }
        complaint = check_result(w, want, r, buffer);
        if (!complaint && is_allreduce(w->job))
            complaint = check_result(w, want, r, FUSION_BUFFER);
    }
    free(want);
    return complaint;
}

// ------------------------------------------------------------------------------------------------------------------ run

// One run of all schedules: repeatedly chooses a possible action until there is none.
struct execution {
    struct world *w;
    int streams;                // of a pair of ranks; 0: messages move in the order of their numbers, local steps in any order
    int *waits;                 // number of waits left of a step
    int *edge, *next_edge;      // the steps that wait for it: STEP_WAITS step + index
    bool *begun, *is_planned;   // is_planned: the move of a send
    int *behind;                // the next one in its stream, or in its rank's list of ready steps
    int *head, *tail;           // of streams: [(from * n + to) * streams + stream]
    int *posted;                // [from * n + to]
    int *number, *moved;        // of a message; number of moved messages of a pair
    int *ready, *ready_tail;    // ready local steps of a rank; with streams they run in order
    int *agenda, planned;       // possible actions: a local step, a send; -1 - rank: the rank's next ready step
    int left;
};

static size_t pair_of(const struct execution *e, int send)
{
    return (size_t)e->w->rank_of[send] * (size_t)e->w->n + (size_t)step_at(e->w, send)->peer;
}

static void plan(struct execution *e, int what) { e->agenda[e->planned++] = what; }

static bool may_move(const struct execution *e, int send)
{
    if (!e->begun[send] || !e->begun[e->w->mate[send]])
        return false;
    const size_t pair = pair_of(e, send);
    if (e->streams)
        return e->head[pair * (size_t)e->streams + (size_t)e->number[send]] == send;
    return e->moved[pair] == e->number[send];
}

static void plan_move(struct execution *e, int send)
{
    if (e->is_planned[send] || !may_move(e, send))
        return;
    e->is_planned[send] = true;
    plan(e, send);
}

static void append(int *head, int *tail, int *behind, int g)
{
    behind[g] = STEP_NONE;
    if (*head == STEP_NONE)
        *head = g;
    else
        behind[*tail] = g;
    *tail = g;
}

static void begin(struct execution *e, int g)
{
    struct world *w = e->w;
    const struct step *step = step_at(w, g);
    const int r = w->rank_of[g];
    e->begun[g] = true;
    if (step->kind == STEP_SEND) {
        w->order[w->ordered++] = 2 * g;
        if (e->streams) {       // here the number is its stream, which may be any: the executor takes the least busy one
            e->number[g] = random_below(e->streams);
            const size_t stream = pair_of(e, g) * (size_t)e->streams + (size_t)e->number[g];
            append(&e->head[stream], &e->tail[stream], e->behind, g);
        }
        plan_move(e, g);
    } else if (step->kind == STEP_RECEIVE) {
        plan_move(e, w->mate[g]);
    } else if (is_shared(step)) {       // the last member does it
        int other = w->mate[g];
        w->order[w->ordered++] = 2 * g;
        while (other != g && e->begun[other])
            other = w->mate[other];
        if (other == g)
            plan(e, g);
    } else if (!e->streams) {
        plan(e, g);
    } else {
        if (e->ready[r] == STEP_NONE)
            plan(e, -1 - r);
        append(&e->ready[r], &e->ready_tail[r], e->behind, g);
    }
}

static void end(struct execution *e, int g)
{
    e->left--;
    e->w->order[e->w->ordered++] = 2 * g + 1;
    int edges[64], count = 0;           // in random order, up to the size of edges[]
    for (int edge = e->edge[g]; edge != STEP_NONE; edge = e->next_edge[edge]) {
        const int waiting = edge / STEP_WAITS;
        if (--e->waits[waiting])
            continue;
        if (count == 64)
            begin(e, waiting);
        else
            edges[count++] = waiting;
    }
    for (; count; count--) {
        const int chosen = random_below(count), waiting = edges[chosen];
        edges[chosen] = edges[count - 1];
        begin(e, waiting);
    }
}

static void move(struct execution *e, int send)
{
    struct world *w = e->w;
    const int receive = w->mate[send];
    const size_t pair = pair_of(e, send);
    w->order[w->ordered++] = 2 * receive;
    act(w, receive);
    int then = STEP_NONE;
    if (e->streams) {
        int *head = &e->head[pair * (size_t)e->streams + (size_t)e->number[send]];
        then = *head = e->behind[send];
    } else {
        e->moved[pair]++;
        then = e->behind[send];
    }
    end(e, send);
    end(e, receive);
    if (then != STEP_NONE)
        plan_move(e, then);
}

static void do_local(struct execution *e, int g)
{
    e->w->order[e->w->ordered++] = 2 * g;
    act(e->w, g);
    end(e, g);
}

static void do_within(struct execution *e, int g)
{
    int one = g;
    act_within(e->w, g);
    do {
        const int next = e->w->mate[one];
        end(e, one);
        one = next;
    } while (one != g);
}

static int *ints(size_t count, int value)
{
    int *made = malloc((count + 1) * sizeof *made);
    for (size_t i = 0; i < count; i++)
        made[i] = value;
    return made;
}

static void execution_open(struct execution *e, struct world *w, int streams)
{
    const size_t steps = (size_t)w->first[w->n], n = (size_t)w->n, lines = n * n * (size_t)(streams ? streams : 1);
    *e = (struct execution){.w = w, .streams = streams, .left = w->first[w->n]};
    e->waits = ints(steps, 0);
    e->edge = ints(steps, STEP_NONE);
    e->next_edge = ints(steps * STEP_WAITS, STEP_NONE);
    e->begun = calloc(steps + 1, sizeof *e->begun);
    e->is_planned = calloc(steps + 1, sizeof *e->is_planned);
    e->behind = ints(steps, STEP_NONE);
    e->head = ints(lines, STEP_NONE);
    e->tail = ints(lines, STEP_NONE);
    e->posted = ints(n * n, 0);
    e->number = ints(steps, 0);
    e->moved = ints(n * n, 0);
    e->ready = ints(n, STEP_NONE);
    e->ready_tail = ints(n, STEP_NONE);
    e->agenda = ints(steps + n, 0);
    w->ordered = 0;
    for (int g = 0; g < w->first[w->n]; g++) {
        const struct step *step = step_at(w, g);
        for (int i = 0; i < STEP_WAITS; i++) {
            if (step->after[i] == STEP_NONE)
                continue;
            const int before = w->first[w->rank_of[g]] + step->after[i];
            e->waits[g]++;
            e->next_edge[STEP_WAITS * g + i] = e->edge[before];
            e->edge[before] = STEP_WAITS * g + i;
        }
        if (step->kind == STEP_SEND && !streams) {
            const size_t pair = pair_of(e, g);
            e->number[g] = e->posted[pair]++;
            append(&e->head[pair], &e->tail[pair], e->behind, g);
        }
    }
}

static void execution_close(struct execution *e)
{
    int *all[] = {e->waits, e->edge, e->next_edge, e->behind, e->head, e->tail, e->posted, e->number, e->moved, e->ready,
                  e->ready_tail, e->agenda};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        free(all[i]);
    free(e->begun);
    free(e->is_planned);
}

static const char *run(struct world *w, int streams)
{
    struct execution e;
    const char *complaint = NULL;
    execution_open(&e, w, streams);
    fill(w);
    for (int g = 0; g < w->first[w->n]; g++)
        if (e.waits[g] == 0 && step_at(w, g)->after[0] == STEP_NONE && step_at(w, g)->after[1] == STEP_NONE)
            begin(&e, g);
    while (e.planned) {
        const int chosen = random_below(e.planned), what = e.agenda[chosen];
        if (what >= 0 || e.behind[e.ready[-1 - what]] == STEP_NONE)
            e.agenda[chosen] = e.agenda[--e.planned];
        if (what < 0) {
            const int g = e.ready[-1 - what];
            e.ready[-1 - what] = e.behind[g];
            do_local(&e, g);
        } else if (step_at(w, what)->kind == STEP_SEND) {
            move(&e, what);
        } else if (is_shared(step_at(w, what))) {
            do_within(&e, what);
        } else {
            do_local(&e, what);
        }
    }
    for (int g = 0; g < w->first[w->n] && e.left && !complaint; g++)
        if (e.begun[g] && step_at(w, g)->kind <= STEP_RECEIVE && !e.begun[w->mate[g]])
            complaint = complain("deadlock with %d streams: %s, and its peer never comes to it", streams, name_of(w, g));
    if (e.left && !complaint)
        complaint = complain("deadlock with %d streams: %d steps are left", streams, e.left);
    execution_close(&e);
    return complaint ? complaint : check_values(w);
}

// ---------------------------------------------------------------------------------------------------------------- races

// Which steps of a rank are over before a node, as bits.
struct past {
    size_t words;
    uint64_t *bits;
};

static void join(struct past *past, int node, int before)
{
    for (size_t i = 0; i < past->words; i++)
        past->bits[(size_t)node * past->words + i] |= past->bits[(size_t)before * past->words + i];
}

static bool is_over_before(const struct past *past, int index, int node)
{
    return past->bits[(size_t)node * past->words + (size_t)index / 64] >> (index % 64) & 1;
}

// The run's order respects the edges, so one pass over it is enough. A receive touches bytes after the send has begun to, and is
// over after the send has read the last byte. The send does not wait for the receive, since there are buffers between them.
// A step within a host is over after all members have begun it.
static struct past past_of(const struct world *w, int rank)
{
    const int count = w->first[rank + 1] - w->first[rank];
    struct past past = {((size_t)count + 63) / 64, NULL};
    past.bits = calloc(2 * (size_t)w->first[w->n] * past.words + 1, sizeof *past.bits);
    for (int i = 0; i < w->ordered; i++) {
        const int node = w->order[i], g = node / 2;
        const struct step *step = step_at(w, g);
        if (step->kind == STEP_RECEIVE)
            join(&past, node, 2 * w->mate[g] + node % 2);
        for (int other = w->mate[g]; is_shared(step) && node % 2 && other != g; other = w->mate[other])
            join(&past, node, 2 * other);
        if (node % 2) {
            join(&past, node, node - 1);
            if (w->rank_of[g] == rank) {
                const int index = g - w->first[rank];
                past.bits[(size_t)node * past.words + (size_t)index / 64] |= (uint64_t)1 << (index % 64);
            }
        } else {
            for (int j = 0; j < STEP_WAITS; j++)
                if (step->after[j] != STEP_NONE)
                    join(&past, node, 2 * (w->first[w->rank_of[g]] + step->after[j]) + 1);
        }
    }
    return past;
}

static bool conflict(const struct touched *one, int ones, const struct touched *other, int others)
{
    for (int i = 0; i < ones; i++)
        for (int j = 0; j < others; j++)
            if ((one[i].writes || other[j].writes) && one[i].begin < other[j].begin + other[j].count &&
                other[j].begin < one[i].begin + one[i].count)
                return true;
    return false;
}

static const char *check_races(const struct world *w, int rank)
{
    const struct past past = past_of(w, rank);
    const int first = w->first[rank], count = w->first[rank + 1] - first;
    struct touched (*touched)[3] = malloc(((size_t)count + 1) * sizeof *touched);
    int *parts = ints((size_t)count, 0);
    const char *complaint = NULL;
    for (int i = 0; i < count; i++)
        parts[i] = touched_by(w, first + i, touched[i]);
    for (int i = 0; i < count && !complaint; i++)
        for (int j = 0; j < i && !complaint; j++)
            if (conflict(touched[i], parts[i], touched[j], parts[j]) && !is_over_before(&past, j, 2 * (first + i)) &&
                !is_over_before(&past, i, 2 * (first + j)))
                complaint = complain("race: %s and %s", name_of(w, first + j), name_of(w, first + i));
    free(touched);
    free(parts);
    free(past.bits);
    return complaint;
}

// ---------------------------------------------------------------------------------------------------------------- check

enum { RANKS_LOOKED_AT = 8 };           // for races, if there are many

static const char *check_world(struct world *w, int seeds)
{
    const char *complaint = lay_out(w);
    complaint = complaint ? complaint : check_steps(w);
    complaint = complaint ? complaint : check_match(w);
    complaint = complaint ? complaint : check_hosts(w);
    for (int seed = 0; seed < seeds && !complaint; seed++) {
        complaint = run(w, 0);
        if (!complaint)
            complaint = run(w, seed % 2 && w->n <= 33 ? 1 + random_below(8) : 1);
    }
    for (int i = 0; i < w->n && !complaint; i++) {
        if (w->n <= 33)
            complaint = check_races(w, i);
        else if (i < RANKS_LOOKED_AT)
            complaint = check_races(w, i < 2 ? i * (w->n - 1) : random_below(w->n));
    }
    return complaint;
}

static void check_job(const struct job *job, int seeds)
{
    struct world world;
    world_open(&world, job);
    const char *complaint = check_world(&world, seeds);
    if (complaint)
        check_fail(__FILE__, __LINE__, "%s, %d ranks, root %d, %zu bytes, cells of %zu: %s", KIND_NAMES[job->kind], job->n,
                   job->root, job->nbytes, job->cell, complaint);
    world_close(&world);
}

// Parts of 0 to `most` cells each, or all equal.
static void check_parts(enum kind kind, int n, size_t cell, int most, bool alike)
{
    size_t *parts = malloc((size_t)n * (size_t)n * sizeof *parts);
    for (int i = 0; i < (kind == ALLTOALL ? n * n : n); i++)
        parts[i] = cell * (size_t)(alike ? most : random_below(most + 1));
    check_job(&(struct job){.kind = kind, .n = n, .cell = cell, .part = parts, .sent = parts}, 2);
    free(parts);
}

static int many(void) { return IS_SANITIZED ? 14 : 33; }

// Scratch is organized in segments, so small cells would make a large memory.
enum { CELL = SEGMENT / 4 };

static void check_allreduce(enum kind kind)
{
    static const int large[] = {64, 100, 127, 256, 1000};
    for (int n = 2; n <= many(); n++) {
        const int counts[] = {0, 1, n - 1, n, 2 * n + 1, 5 * n - 1};
        for (size_t i = 0; i < sizeof counts / sizeof *counts; i++)
            check_job(&(struct job){.kind = kind, .n = n, .cell = CELL, .nbytes = CELL * (size_t)counts[i]}, 2);
        if (n > 9 && n != 16 && n != 19)
            continue;
        const size_t segments = kind == RING ? (size_t)n * 3 : kind == DOUBLING ? 19 : (size_t)(n + 5);
        check_job(&(struct job){.kind = kind, .n = n, .cell = CELL, .nbytes = SEGMENT * segments - CELL}, 4);
        check_job(&(struct job){.kind = kind, .n = n, .cell = CELL, .nbytes = SEGMENT * segments + CELL}, 4);
        if (n < 6) {
            check_job(&(struct job){.kind = kind, .n = n, .cell = 4, .nbytes = 4}, 2);
            check_job(&(struct job){.kind = kind, .n = n, .cell = 1, .nbytes = 1001}, 1);
            check_job(&(struct job){.kind = kind, .n = n, .cell = 8, .nbytes = SEGMENT + 8 * 3}, 1);
        }
    }
    for (size_t i = 0; i < sizeof large / sizeof *large; i++) {
        const int n = large[i];
        if (IS_SANITIZED && n > 127)
            break;
        check_job(&(struct job){.kind = kind, .n = n, .cell = CELL, .nbytes = CELL * (n > 127 ? 40 : 130)}, 1);
    }
}

TEST(ring) { check_allreduce(RING); }
TEST(doubling) { check_allreduce(DOUBLING); }
TEST(halving) { check_allreduce(HALVING); }

TEST(two_levels)
{
    static const char *const hosts[] = {"AABB", "ABBB", "AAABB", "AABBCC", "AABBBCCCC", "ABBCCDDEE"};
    for (size_t i = 0; i < sizeof hosts / sizeof *hosts; i++)
        for (enum allreduce_path path = ALLREDUCE_RING; path <= ALLREDUCE_HALVING; path++)
            for (size_t in_flight = 1; in_flight <= SHARDS_IN_FLIGHT; in_flight += 3)
                for (size_t nbytes = 64; nbytes <= 100 * 1024; nbytes = nbytes * 3 / 64 * 64 + 64)
                    check_job(&(struct job){.kind = HIERARCHICAL, .n = (int)strlen(hosts[i]), .cell = 64, .nbytes = nbytes,
                                            .hosts = hosts[i], .path = path, .in_flight = in_flight}, IS_SANITIZED ? 1 : 2);
}

TEST(parts)
{
    for (enum kind kind = ALLGATHER; kind < BROADCAST; kind++) {
        for (int n = 1; n <= many(); n++) {
            check_parts(kind, n, 4, 0, true);
            check_parts(kind, n, 4, 1, true);
            check_parts(kind, n, 4, 3, false);
            if (n <= 9)
                check_parts(kind, n, CELL, 11, false);
        }
        check_parts(kind, IS_SANITIZED ? 40 : 100, 4, 1, false);
    }
}

// Only few of a thousand ranks have data.
TEST(few_have_parts)
{
    const int n = IS_SANITIZED ? 200 : 1000;
    size_t *part = calloc((size_t)n, sizeof *part);
    part[0] = part[n / 3] = part[n - 1] = 8;
    check_job(&(struct job){.kind = ALLGATHER, .n = n, .cell = 4, .part = part}, 1);
    check_job(&(struct job){.kind = ALLGATHER_DOUBLING, .n = n, .cell = 4, .part = part}, 1);
    check_job(&(struct job){.kind = REDUCESCATTER, .n = n, .cell = 4, .part = part}, 1);
    free(part);
}

static int messages_of_allgather(int n, uint32_t alpha_ns, size_t nbytes)
{
    const struct network_cost network = {alpha_ns, 0};
    size_t *part = malloc((size_t)n * sizeof *part);
    struct schedule schedule;
    int sends = 0;
    for (int i = 0; i < n; i++)
        part[i] = nbytes;
    schedule_init(&schedule, n, 0);
    allgather_schedule(&schedule, &network, part);
    for (int i = 0; i < schedule.count; i++)
        sends += schedule.steps[i].kind == STEP_SEND;
    schedule_fini(&schedule);
    free(part);
    return sends;
}

// Few messages if messages dominate the cost, one latency if latency or bytes do.
TEST(a_small_allgather_among_many_takes_few_messages)
{
    CHECK_EQ(messages_of_allgather(64, 0, 4), 6);
    CHECK_EQ(messages_of_allgather(1000, 1000000, 4), 10);
    CHECK_EQ(messages_of_allgather(3, 0, 4), 2);
    CHECK_EQ(messages_of_allgather(8, 5000000, 4), 7);
    CHECK_EQ(messages_of_allgather(64, 0, SEGMENT), 63);
}

TEST(broadcast)
{
    for (int n = 1; n <= many(); n++)
        for (int root = 0; root < n; root += n < 9 ? 1 : 5)
            for (size_t cells = 0; cells < 12; cells += 5)
                for (int chain = 0; chain < 2; chain++)
                    check_job(&(struct job){.kind = BROADCAST, .n = n, .root = root, .cell = CELL, .nbytes = CELL * cells,
                                            .chain = chain}, 2);
    for (int n = 127; n < 1100; n += 873)
        for (int chain = 0; chain < 2; chain++)
            check_job(&(struct job){.kind = BROADCAST, .n = n, .root = n / 3, .cell = SEGMENT, .nbytes = 3 * SEGMENT, .chain = chain}, 1);
}

// The root's link carries each byte log2 n times in a tree, once in a chain, in which the last rank is n - 1 hops away.
TEST(a_broadcast_takes_a_chain_where_bytes_are_what_it_costs)
{
    const struct network_cost near = {0, 8000}, far = {20000000, 8000};  // 1 Gbit/s; 20 ms
    CHECK(!broadcast_by_chain(2, &near, 100 << 20));
    CHECK(!broadcast_by_chain(4, &near, SEGMENT));
    CHECK(broadcast_by_chain(4, &near, 8 * SEGMENT));
    CHECK(!broadcast_by_chain(4, &far, 8 * SEGMENT));
    CHECK(broadcast_by_chain(4, &far, 100 << 20));
    CHECK(broadcast_by_chain(64, &near, 100 << 20));
    CHECK(!broadcast_by_chain(64, &far, 10 << 20));
}

TEST(codes)
{
    enum { FEW = SEGMENT / 8 };
    for (enum kind kind = OWNERS; kind <= PEERS_IN_PLACE; kind++) {
        for (int n = kind == PEERS_IN_PLACE ? 2 : 1; n <= (kind == EVERYONE ? many() / 2 : many()); n++) {
            const size_t chunks = kind == OWNERS ? (size_t)n : 1;
            check_job(&(struct job){.kind = kind, .n = n, .cell = FEW, .nbytes = FEW * (chunks + 1)}, 2);
            check_job(&(struct job){.kind = kind, .n = n, .cell = FEW, .nbytes = FEW}, 1);
            // More segments than slots; some chunks lack the last one.
            if (n < 8)
                check_job(&(struct job){.kind = kind, .n = n, .cell = FEW, .nbytes = SEGMENT * chunks * 5 + FEW}, 3);
        }
        check_job(&(struct job){.kind = kind, .n = IS_SANITIZED ? 40 : kind == EVERYONE ? 64 : 100, .cell = FEW, .nbytes = 3 * FEW}, 1);
    }
}

// --------------------------------------------------------------------------------------------------- of the checker itself

// The verifier's complaint about a changed step; the change is undone.
static const char *check_changed(struct world *w, int g, struct step changed)
{
    struct step *step = step_at(w, g), before = *step;
    *step = changed;
    const char *complaint = check_world(w, 2);
    *step = before;
    return complaint;
}

// Whether a step begins after another one is over even without one of its waits.
static bool is_waited_for_anyhow(struct world *w, int g, int wait)
{
    struct step *step = step_at(w, g), before = *step;
    const int rank = w->rank_of[g], index = before.after[wait];
    step->after[wait] = STEP_NONE;
    const struct past past = past_of(w, rank);
    const bool is_over = is_over_before(&past, index, 2 * g);
    *step = before;
    free(past.bits);
    return is_over;
}

static void check_noticed(struct world *w, int g, const char *change, struct step changed)
{
    if (!check_changed(w, g, changed))
        check_fail(__FILE__, __LINE__, "%s, %d ranks: %s: nobody notices %s", KIND_NAMES[w->job->kind], w->n, name_of(w, g),
                   change);
}

static void check_mutations(const struct job *job, int *noticed, int *needless)
{
    struct world world, *w = &world;
    world_open(w, job);
    CHECK(!check_world(w, 1));
    for (int r = 0; r < w->n; r += 2) {
        for (int g = w->first[r]; g < w->first[r + 1]; g++) {
            const struct step step = *step_at(w, g);
            for (int i = 0; i < STEP_WAITS; i++) {
                struct step changed = step;
                if (step.after[i] == STEP_NONE || (is_shared(&step) && i == 1))       // the order within the host is no wait
                    continue;
                changed.after[i] = STEP_NONE;
                CHECK(!check_world(w, 1));              // the order of an unchanged run
                // These waits may be redundant. In halving, a rank receives only in response to its own sends. Some results of
                // reducescatter are where no data is sent from. A slot that is free because all of it was awaited, or the
                // memory of a part, may not be used again by all ranks. Sends from the input wait until the peer expects them, but
                // only for pacing.
                if (is_waited_for_anyhow(w, g, i) ||
                    (job->kind == HALVING && step.kind == STEP_RECEIVE) ||
                    ((is_of_codes(job) || job->kind == HIERARCHICAL) && step.kind == STEP_NOOP && !check_changed(w, g, changed)) ||
                    (job->kind == PEERS_IN_PLACE && step.kind == STEP_SEND) ||
                    (is_reducescatter(job) && !check_changed(w, g, changed))) {
                    ++*needless;
                    continue;
                }
                check_noticed(w, g, "that a wait is gone", changed);
                ++*noticed;
            }
            if (step.kind == STEP_NOOP || step.nbytes == 0)
                continue;
            struct step changed = step;
            changed.nbytes -= job->cell;
            check_noticed(w, g, "a size", changed);
            changed = step;
            changed.kind = STEP_NOOP;
            check_noticed(w, g, "that a step is not done", changed);
            changed = step;
            changed.to.offset += job->cell;
            changed.from.offset += job->cell;
            check_noticed(w, g, "a location", changed);
            if (step.kind <= STEP_RECEIVE) {
                changed = step;
                changed.peer = (step.peer + 1) % w->n == r ? (step.peer + 2) % w->n : (step.peer + 1) % w->n;
                check_noticed(w, g, "a peer", changed);
            }
            if (step.kind == STEP_REDUCE) {
                changed = step;
                changed.other = step.from;
                check_noticed(w, g, "that something is added twice", changed);
            }
            *noticed += 3;
        }
    }
    world_close(w);
}

TEST(every_mutation_is_noticed)
{
    size_t part[] = {8, 0, 4, 12, 8};
    const struct job jobs[] = {
        {.kind = HIERARCHICAL, .n = 5, .cell = 1024, .nbytes = 40 << 10, .hosts = "AABBB", .path = ALLREDUCE_RING, .in_flight = 2},
        {.kind = RING, .n = 3, .cell = CELL, .nbytes = CELL * 7},
        {.kind = RING, .n = 11, .cell = CELL, .nbytes = CELL * 11},                        // more messages than the window holds
        {.kind = DOUBLING, .n = 6, .cell = CELL, .nbytes = CELL * 2},
        {.kind = DOUBLING, .n = 3, .cell = SEGMENT, .nbytes = 10 * SEGMENT},
        {.kind = HALVING, .n = 6, .cell = 4, .nbytes = 4 * 9},
        {.kind = REDUCESCATTER, .n = 5, .cell = 4, .part = part},
        {.kind = REDUCESCATTER_LOADS, .n = 5, .cell = 4, .part = part},
        {.kind = BROADCAST, .n = 6, .root = 1, .cell = SEGMENT, .nbytes = 2 * SEGMENT},
        {.kind = BROADCAST, .n = 4, .root = 1, .cell = SEGMENT, .nbytes = 2 * SEGMENT, .chain = true},
        {.kind = OWNERS, .n = 4, .cell = SEGMENT / 2, .nbytes = 4 * SEGMENT * 4 + SEGMENT},
        {.kind = EVERYONE, .n = 3, .cell = SEGMENT / 2, .nbytes = 5 * SEGMENT},
        {.kind = PEERS, .n = 5, .cell = SEGMENT / 2, .nbytes = 5 * SEGMENT},
        {.kind = PEERS_IN_PLACE, .n = 3, .cell = SEGMENT / 2, .nbytes = 5 * SEGMENT},
    };
    int noticed = 0, needless = 0;
    for (size_t i = 0; i < sizeof jobs / sizeof *jobs; i++) {
        if (!IS_SANITIZED || i == 0)
            check_mutations(&jobs[i], &noticed, &needless);
    }
    CHECK(noticed > (IS_SANITIZED ? 20 : 1000));
    printf(" (%d noticed, %d waits for what is over anyhow)", noticed, needless);
}

// Every rank receives first.
TEST(a_deadlock_is_noticed)
{
    const struct job job = {.kind = DOUBLING, .n = 2, .cell = CELL, .nbytes = CELL};
    struct world world;
    world_open(&world, &job);
    for (int r = 0; r < 2; r++) {
        struct schedule *schedule = &world.schedules[r];
        for (int i = 0; i < schedule->count; i++)
            for (int j = i + 1; j < schedule->count; j++)
                if (schedule->steps[i].kind == STEP_SEND && schedule->steps[j].kind == STEP_RECEIVE) {
                    const struct step send = schedule->steps[i];
                    schedule->steps[i] = schedule->steps[j];
                    schedule->steps[j] = send;
                    schedule->steps[j].after[1] = i;
                }
    }
    const char *complaint = check_world(&world, 1);
    CHECK(complaint);
    CHECK_STR_CONTAINS(complaint, "deadlock");
    world_close(&world);
}
