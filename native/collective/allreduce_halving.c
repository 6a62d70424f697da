// Allreduce by recursive halving and doubling (Rabenseifner, 2004), for vector sizes between those where latency dominates and
// those where only bytes matter. The vector is cut into p chunks; after the first half rank r owns chunk r.
//
//     distance d = p/2 ... 1:   ranks r and r ^ d hold the same chunks; each keeps its half of them, sends the other half
//                               and adds what it receives
//     distance d = 1 ... p/2:   ranks r and r ^ d send each other the chunks that they have finished
//
// Cost: 2 N (p-1)/p elements each way per rank, 2 log2 p latencies; with ranks that do not make a power of two, 2 N and two
// latencies more. Both sides of an exchange add in the same order, and every chunk is finished once, so all end bit-equal.
#include "collective/fold.h"
#include "collective/schedules.h"

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
    struct byte_range range;
    for (size_t i = 0; (range = byte_range_segment(whole, i)).nbytes; i++)
        schedule_send(h->schedule, fold_position(&h->fold, peer), in_buffer(FUSION_BUFFER, range.begin), range.nbytes, after);
}

// Adds this part as the peer sends it, segment by segment. Returns the step after which all is added.
static int add(const struct halving *h, int peer, struct byte_range whole, size_t *scratch, int after)
{
    struct byte_range range;
    int all = after;
    for (size_t i = 0; (range = byte_range_segment(whole, i)).nbytes; i++, *scratch += range.nbytes) {
        const struct location own = in_buffer(FUSION_BUFFER, range.begin), theirs = in_buffer(SCRATCH_BUFFER, *scratch);
        const bool own_is_lower = h->fold.rank < peer;
        const int came = schedule_receive(h->schedule, fold_position(&h->fold, peer), theirs, range.nbytes, STEP_NONE);
        const int added = schedule_reduce(h->schedule, own, own_is_lower ? own : theirs, own_is_lower ? theirs : own,
                                          range.nbytes, schedule_both(h->schedule, after, came));
        all = schedule_both(h->schedule, all, added);
    }
    return all;
}

// Receives the peer's finished part. It comes only after this rank has sent its contribution to it, so it may overwrite the vector.
static int take(const struct halving *h, int peer, struct byte_range whole, int after)
{
    struct byte_range range;
    int all = after;
    for (size_t i = 0; (range = byte_range_segment(whole, i)).nbytes; i++)
        all = schedule_both(h->schedule, all, schedule_receive(h->schedule, fold_position(&h->fold, peer),
                                                               in_buffer(FUSION_BUFFER, range.begin), range.nbytes, after));
    return all;
}

void schedule_allreduce_halving(struct schedule *schedule, size_t nbytes, size_t element)
{
    const struct halving h = {schedule, fold_of(schedule->size, schedule->rank), nbytes, element};
    const int rank = h.fold.rank;
    size_t scratch = 0;
    int done = STEP_NONE;
    struct byte_range range;
    for (size_t i = 0; (range = byte_range_segment((struct byte_range){0, nbytes}, i)).nbytes; i++, scratch += range.nbytes) {
        if (rank < 0)
            fold_extra(schedule, &h.fold, range);
        else
            done = schedule_both(schedule, done,
                                 fold_begin(schedule, &h.fold, range, in_buffer(SCRATCH_BUFFER, scratch), STEP_NONE));
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
    for (size_t i = 0; (range = byte_range_segment((struct byte_range){0, nbytes}, i)).nbytes; i++)
        fold_end(schedule, &h.fold, range, done);
}
