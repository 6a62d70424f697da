// Allreduce over links: the cheapest of three schedules, or the requested one.
#include "collective/collectives.h"

#include "base/status.h"

enum { SEGMENTS_IN_FLIGHT = 8 };  // received segments (doubling: of a round) that wait to be added, at most

static const char *const PATH_NAMES[] = {"", "ring", "doubling", "halving"};

bhvd_status allreduce_path_parse(const char *name, enum allreduce_path *path, struct bhvd_error *error)
{
    for (int i = ALLREDUCE_CHOSEN; i <= ALLREDUCE_HALVING; i++) {
        *path = (enum allreduce_path)i;
        if (strcmp(name ? name : "", PATH_NAMES[i]) == 0)
            return BHVD_OK;
    }
    return error_set(error, BHVD_ERR_ARGUMENT, "unknown allreduce path \"%s\"; known are %s, %s, %s", name, PATH_NAMES[1],
                     PATH_NAMES[2], PATH_NAMES[3]);
}

// Cost of an allreduce between hosts, in nanoseconds: alpha (latency) for each message that waits for the one before, beta for
// each byte sent, gamma for each byte added. Alpha and beta are measured when ranks connect; alpha is at least the ranks' own
// overhead. For gamma see `python -m tests.laboratory --hosts` and docs/performance.md.
// The wire idles at the start of each round that waits for the whole previous round: hosts have different delays, and another
// connection has to speed up. Only the ratios matter, and these only slightly.
enum { GAMMA_PS = 40, IDLE_PERCENT = 10 };

struct cost {
    double alphas, sent, added;
    double serialized;              // bytes of `sent` in rounds that wait for the round before
};

static double cost_ns(const struct network_cost *network, struct cost cost)
{
    const double sent = cost.sent + IDLE_PERCENT / 100.0 * cost.serialized;
    return network_alpha_ns(network) * cost.alphas + (network_beta_ps(network) * sent + GAMMA_PS * cost.added) / 1000.0;
}

static enum allreduce_path cheapest_over_links(int n, size_t nbytes, const struct network_cost *network)
{
    int p = 1, rounds = 0;
    for (; 2 * p <= n; p *= 2)
        rounds++;
    const int folds = p < n, steps = 2 * (n - 1);
    const double N = (double)nbytes, part = 1.0 * (p - 1) / p, chunk = N / n;
    const double segment = chunk < SCHEDULE_SEGMENT ? chunk : SCHEDULE_SEGMENT;
    struct cost doubling = {.alphas = rounds + 2 * folds, .sent = (rounds + 2 * folds) * N, .added = (rounds + folds) * N};
    struct cost halving = {.alphas = 2 * rounds + 2 * folds, .sent = (2 * part + 2 * folds) * N, .added = (part + folds) * N};
    doubling.serialized = doubling.sent - N;
    halving.serialized = halving.sent - (folds ? N : N / 2);
    // The ring adds while the wire is busy. Long chunks hide the latency, since a segment is forwarded at once.
    const double bandwidth_bound = cost_ns(network, (struct cost){.alphas = 1, .sent = steps * chunk});
    const double latency_bound = cost_ns(network, (struct cost){.alphas = steps, .sent = steps * segment});
    const double ring = bandwidth_bound > latency_bound ? bandwidth_bound : latency_bound;
    const double by_doubling = cost_ns(network, doubling), by_halving = cost_ns(network, halving);
    const enum allreduce_path best = by_doubling <= by_halving ? ALLREDUCE_DOUBLING : ALLREDUCE_HALVING;
    return (by_doubling <= by_halving ? by_doubling : by_halving) <= ring ? best : ALLREDUCE_RING;
}

void allreduce_schedule(struct schedule *schedule, enum allreduce_path path, const struct network_cost *network, size_t nbytes,
                        size_t element)
{
    if (path == ALLREDUCE_CHOSEN)
        path = cheapest_over_links(schedule->size, nbytes, network);
    if (path == ALLREDUCE_DOUBLING)
        schedule_allreduce_doubling(schedule, nbytes);
    else if (path == ALLREDUCE_HALVING)
        schedule_allreduce_halving(schedule, nbytes, element);
    else
        schedule_allreduce_ring(schedule, nbytes, element);
}

void allreduce_plan(struct plan *plan, const struct executor *exec, const struct group *group, const struct reduction *reduction,
                    const struct span_list *list)
{
    allreduce_schedule(plan_begin(plan, group), exec->allreduce_path, &exec->network, list->nbytes,
                       bhvd_dtype_size(reduction->dtype));
    plan->operands = (struct operands){.reduction = *reduction, .list = list};
}

// ---------------------------------------------------------------------------------------------------------------- ring

// Ring allreduce (Patarasu and Yuan, 2009). Ranks form a ring; the vector is cut into n chunks.
//
//     n-1 steps reduce-scatter:  send chunk (r - s), receive chunk (r - s - 1) and add the own one; after the last step
//                                rank r holds the sum of chunk r + 1
//     n-1 steps allgather:       send the finished chunk (r + 1 - s), receive chunk (r - s)
//
// Chunks are sent in segments, each forwarded once it is added, through all 2 (n-1) steps without a break: additions overlap with
// the wire in both directions. Every tensor byte is read when its segment is first needed and written when its segment is final, so
// packing and unpacking overlap with the wire too.
// Cost: 2 N (n-1)/n elements per rank, 2 (n-1) latencies. The order of additions differs from chunk to chunk, but every chunk
// is finished by one rank and copied, so all ranks end bit-equal.

// Chunk indices wrap round the ring.
static struct byte_range chunk(size_t nbytes, size_t element, int index, int n)
{
    const int at = (index % n + n) % n;
    const size_t begin = vector_chunk(nbytes, element, at, n);
    return (struct byte_range){begin, vector_chunk(nbytes, element, at + 1, n) - begin};
}

void schedule_allreduce_ring(struct schedule *schedule, size_t nbytes, size_t element)
{
    const int n = schedule->size, r = schedule->rank, next = (r + 1) % n, previous = (r + n - 1) % n, steps = 2 * (n - 1);
    const struct byte_range first = chunk(nbytes, element, r, n);
    for_each_segment(range, first)
        schedule_send(schedule, next, in_buffer(FUSION_BUFFER, range.begin), range.nbytes,
                      schedule_load(schedule, range, STEP_NONE));
    int added[SEGMENTS_IN_FLIGHT];  // the last step that read each scratch slot
    for (int slot = 0; slot < SEGMENTS_IN_FLIGHT; slot++)
        added[slot] = STEP_NONE;
    int arrived = 0;
    for (int s = 0; s < steps; s++) {
        const bool adds = s < n - 1, is_final = s >= n - 2, goes_on = s < steps - 1;
        const struct byte_range whole = chunk(nbytes, element, adds ? r - s - 1 : r - (s - (n - 1)), n);
        for_each_segment(range, whole) {
            const struct location own = in_buffer(FUSION_BUFFER, range.begin);
            int done;
            if (adds) {
                const int slot = arrived++ % SEGMENTS_IN_FLIGHT;
                const struct location received = in_buffer(SCRATCH_BUFFER, (size_t)slot * SCHEDULE_SEGMENT);
                done = schedule_receive(schedule, previous, received, range.nbytes, added[slot]);
                done = schedule_load(schedule, range, done);
                added[slot] = done = schedule_reduce(schedule, own, own, received, range.nbytes, done);
                if (is_final)
                    done = schedule_scale(schedule, own, range.nbytes, done);
            } else {
                done = schedule_receive(schedule, previous, own, range.nbytes, STEP_NONE);
            }
            if (goes_on)
                schedule_send(schedule, next, own, range.nbytes, done);
            if (is_final)
                schedule_store(schedule, range, done);
        }
    }
}

// ------------------------------------------------------------------------------------------------------- powers of two

// Reduces n ranks to a power of two, p, for algorithms that pair ranks by a bit of their number. Of the first 2 (n - p) ranks, the
// even ones send their vectors to their odd neighbors and receive the result at the end.

enum { FOLD_ROUNDS_MAX = 30 };

struct fold {
    int size;                   // p
    int extra;                  // n - p
    int rank;                   // this rank's number among the p; -1: it gives its neighbor its vector, and gets the result
    int neighbor;               // position of the neighbor that sends and receives; -1: none
};

static struct fold fold_of(int n, int rank)
{
    struct fold fold = {.size = 1, .neighbor = -1};
    while (2 * fold.size <= n)
        fold.size *= 2;
    fold.extra = n - fold.size;
    fold.rank = rank - fold.extra;
    if (rank < 2 * fold.extra) {
        fold.rank = rank % 2 ? rank / 2 : -1;
        fold.neighbor = rank ^ 1;
    }
    return fold;
}

// Position of the rank with this number among the p.
static int fold_position(const struct fold *fold, int rank)
{
    return rank < fold->extra ? 2 * rank + 1 : rank + fold->extra;
}

// For a rank outside the p: sends this part, and receives the result.
static void fold_extra(struct schedule *schedule, const struct fold *fold, struct byte_range range)
{
    const struct location own = in_buffer(FUSION_BUFFER, range.begin);
    const int sent = schedule_send(schedule, fold->neighbor, own, range.nbytes, schedule_load(schedule, range, STEP_NONE));
    schedule_store(schedule, range, schedule_receive(schedule, fold->neighbor, own, range.nbytes, sent));
}

// For the others: loads this part, and adds the neighbor's, which is received into `received` after step `after`.
static int fold_begin(struct schedule *schedule, const struct fold *fold, struct byte_range range, struct location received,
                             int after)
{
    const struct location own = in_buffer(FUSION_BUFFER, range.begin);
    const int loaded = schedule_load(schedule, range, STEP_NONE);
    if (fold->neighbor < 0)
        return loaded;
    const int came = schedule_receive(schedule, fold->neighbor, received, range.nbytes, after);
    return schedule_reduce(schedule, own, received, own, range.nbytes, schedule_both(schedule, loaded, came));
}

// Sends the result of this part to the neighbor, and stores it in the tensors.
static void fold_end(struct schedule *schedule, const struct fold *fold, struct byte_range range, int done)
{
    if (fold->neighbor >= 0)
        schedule_send(schedule, fold->neighbor, in_buffer(FUSION_BUFFER, range.begin), range.nbytes, done);
    schedule_store(schedule, range, done);
}

// -------------------------------------------------------------------------------------------------- recursive doubling

// Allreduce by recursive doubling, for vectors so short that latency dominates: in round d rank r exchanges its whole
// vector with rank r ^ 2^d, and both add them in the same order. So all ranks end bit-equal.
// Cost: log2 p N elements each way per rank, log2 p latencies; two more for the ranks that do not make a power of two.

// Runs all rounds for one segment of the vector. Segments wait for each other only for scratch slots: added[round] is the last step
// that read this slot.
static void exchange(struct schedule *schedule, const struct fold *fold, struct byte_range range, size_t slot, int *added)
{
    const struct location own = in_buffer(FUSION_BUFFER, range.begin);
    int round = 0, done = added[0] = fold_begin(schedule, fold, range, in_buffer(SCRATCH_BUFFER, slot * SCHEDULE_SEGMENT),
                                                added[0]);
    for (int distance = 1; distance < fold->size; distance *= 2) {
        round++;
        const int peer = fold_position(fold, fold->rank ^ distance);
        const struct location theirs = in_buffer(SCRATCH_BUFFER, ((size_t)round * SEGMENTS_IN_FLIGHT + slot) * SCHEDULE_SEGMENT);
        const bool own_is_lower = !(fold->rank & distance);
        const int sent = schedule_send(schedule, peer, own, range.nbytes, done);
        const int came = schedule_receive(schedule, peer, theirs, range.nbytes, added[round]);
        done = added[round] = schedule_reduce(schedule, own, own_is_lower ? own : theirs, own_is_lower ? theirs : own,
                                              range.nbytes, schedule_both(schedule, sent, came));
    }
    fold_end(schedule, fold, range, schedule_scale(schedule, own, range.nbytes, done));
}

void schedule_allreduce_doubling(struct schedule *schedule, size_t nbytes)
{
    const struct fold fold = fold_of(schedule->size, schedule->rank);
    int added[SEGMENTS_IN_FLIGHT][1 + FOLD_ROUNDS_MAX];
    for (int slot = 0; slot < SEGMENTS_IN_FLIGHT; slot++)
        for (int round = 0; round <= FOLD_ROUNDS_MAX; round++)
            added[slot][round] = STEP_NONE;
    for_each_segment(range, (struct byte_range){0, nbytes}) {
        const size_t slot = range.begin / SCHEDULE_SEGMENT % SEGMENTS_IN_FLIGHT;
        if (fold.rank < 0)
            fold_extra(schedule, &fold, range);
        else
            exchange(schedule, &fold, range, slot, added[slot]);
    }
}

// ------------------------------------------------------------------------------------------------ halving and doubling

// Allreduce by recursive halving and doubling (Rabenseifner, 2004), for vector sizes between those where latency dominates and
// those where only bytes matter. The vector is cut into p chunks; after the first half rank r owns chunk r.
//
//     distance d = p/2 ... 1:   ranks r and r ^ d hold the same chunks; each keeps its half of them, sends the other half
//                               and adds what it receives
//     distance d = 1 ... p/2:   ranks r and r ^ d send each other the chunks that they have finished
//
// Cost: 2 N (p-1)/p elements each way per rank, 2 log2 p latencies; with ranks that do not make a power of two, 2 N and two
// latencies more. Both sides of an exchange add in the same order, and every chunk is finished once, so all end bit-equal.

struct halving {
    struct schedule *schedule;
    struct fold fold;
    size_t nbytes, element;
};

// The chunks that `rank` keeps at this distance.
static struct byte_range kept(const struct halving *h, int rank, int distance)
{
    const int first = rank / distance * distance;
    const size_t begin = vector_chunk(h->nbytes, h->element, first, h->fold.size);
    return (struct byte_range){begin, vector_chunk(h->nbytes, h->element, first + distance, h->fold.size) - begin};
}

static void send(const struct halving *h, int peer, struct byte_range whole, int after)
{
    for_each_segment(range, whole)
        schedule_send(h->schedule, fold_position(&h->fold, peer), in_buffer(FUSION_BUFFER, range.begin), range.nbytes, after);
}

// Adds this part as the peer sends it, segment by segment. Returns the step after which all is added.
static int add(const struct halving *h, int peer, struct byte_range whole, size_t *scratch, int after)
{
    int all = after;
    for_each_segment(range, whole) {
        const struct location own = in_buffer(FUSION_BUFFER, range.begin), theirs = in_buffer(SCRATCH_BUFFER, *scratch);
        const bool own_is_lower = h->fold.rank < peer;
        const int came = schedule_receive(h->schedule, fold_position(&h->fold, peer), theirs, range.nbytes, STEP_NONE);
        const int added = schedule_reduce(h->schedule, own, own_is_lower ? own : theirs, own_is_lower ? theirs : own,
                                          range.nbytes, schedule_both(h->schedule, after, came));
        all = schedule_both(h->schedule, all, added);
        *scratch += range.nbytes;
    }
    return all;
}

// Receives the peer's finished part. It comes only after this rank has sent its contribution to it, so it may overwrite the vector.
static int take(const struct halving *h, int peer, struct byte_range whole, int after)
{
    int all = after;
    for_each_segment(range, whole)
        all = schedule_both(h->schedule, all, schedule_receive(h->schedule, fold_position(&h->fold, peer),
                                                               in_buffer(FUSION_BUFFER, range.begin), range.nbytes, after));
    return all;
}

void schedule_allreduce_halving(struct schedule *schedule, size_t nbytes, size_t element)
{
    const struct halving h = {schedule, fold_of(schedule->size, schedule->rank), nbytes, element};
    const int rank = h.fold.rank;
    size_t scratch = nbytes;            // begins after the neighbor's values
    int done = STEP_NONE;
    for_each_segment(range, (struct byte_range){0, nbytes}) {
        if (rank < 0)
            fold_extra(schedule, &h.fold, range);
        else
            done = schedule_both(schedule, done,
                                 fold_begin(schedule, &h.fold, range, in_buffer(SCRATCH_BUFFER, range.begin), STEP_NONE));
    }
    if (rank < 0)
        return;
    for (int distance = h.fold.size / 2; distance >= 1; distance /= 2) {
        const int peer = rank ^ distance;
        send(&h, peer, kept(&h, peer, distance), done);
        done = add(&h, peer, kept(&h, rank, distance), &scratch, done);
    }
    const struct byte_range mine = kept(&h, rank, 1);
    done = schedule_scale(schedule, in_buffer(FUSION_BUFFER, mine.begin), mine.nbytes, done);
    for (int distance = 1; distance < h.fold.size; distance *= 2) {
        const int peer = rank ^ distance;
        send(&h, peer, kept(&h, rank, distance), done);
        done = take(&h, peer, kept(&h, peer, distance), done);
    }
    for_each_segment(range, (struct byte_range){0, nbytes})
        fold_end(schedule, &h.fold, range, done);
}
