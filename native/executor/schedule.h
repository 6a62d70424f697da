// A schedule: one rank's part in a collective between hosts, as a list of typed steps, each with the steps that it waits for.
//
//     write      by one short function per algorithm (collective/), which knows only the group's size, this rank's position and
//                the number of bytes, or how the ranks are spread over hosts: so every rank's schedule can be written anywhere
//     read       by the executor (task.h), which runs many at once; by the checker of tests/native/test_schedules.c; by the
//                simulator (simulator.h)
//
// Messages between two ranks are numbered in the order in which each writes them: the k-th send of one is the k-th receive of
// the other. A step waits only for earlier ones of its list, so a schedule cannot deadlock by itself.
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/size.h"

enum { SCHEDULE_SEGMENT = 256 * 1024 };     // bytes per message: reduction of one overlaps with transfer of another

// Cost of a message of n bytes between hosts, alpha + beta n (Hockney's model), equal on all ranks of an execution. alpha: latency;
// beta: picoseconds per byte; 0: unknown.
struct network_cost {
    uint32_t alpha_ns, beta_ps;
};

// If unknown, that of 10 Gbit/s.
static inline double network_beta_ps(const struct network_cost *network) { return network->beta_ps ? network->beta_ps : 900; }

// The memory of a location.
enum buffer_kind {
    INPUT_BUFFER,       // the operation's tensor; not written
    OUTPUT_BUFFER,      // its result
    FUSION_BUFFER,      // the vector: the fused tensors of an allreduce, as one
    SCRATCH_BUFFER,
    BUFFER_COUNT
};

struct location {
    enum buffer_kind buffer;
    size_t offset;      // bytes
};

static inline struct location in_buffer(enum buffer_kind buffer, size_t offset) { return (struct location){buffer, offset}; }

// A range of bytes, and its division into segments.
struct byte_range {
    size_t begin, nbytes;
};

// The segment that begins there; nbytes 0: it is the range's end.
static inline struct byte_range segment_at(struct byte_range range, size_t begin)
{
    return (struct byte_range){begin, size_piece(range.begin + range.nbytes, begin, SCHEDULE_SEGMENT)};
}
// The last argument is a range.
#define for_each_segment(segment, ...)                                                                      \
    for (struct byte_range whole_ = __VA_ARGS__, segment = segment_at(whole_, whole_.begin); segment.nbytes; \
         segment = segment_at(whole_, segment.begin + segment.nbytes))

// The size in bytes of whole segments, of which at most `most` make up a vector.
static inline size_t schedule_piece(size_t nbytes, size_t most)
{
    const size_t segments = (nbytes + SCHEDULE_SEGMENT - 1) / SCHEDULE_SEGMENT;
    return (segments ? (segments + most - 1) / most : 1) * SCHEDULE_SEGMENT;
}

enum step_kind {
    STEP_SEND,          // `from` to the peer
    STEP_RECEIVE,       // from the peer into `to`
    STEP_LOAD,          // the tensors' values into this part of the vector, prescaled
    STEP_REDUCE,        // to = from + other
    STEP_SCALE,         // to = to * postscale
    STEP_STORE,         // final: this part of the vector to the tensors
    STEP_COPY,          // to = from
    STEP_NOOP,          // does nothing: joins two dependencies into one
    // A collective of this host's members, in memory that they share (executor/shared.h), as the schedule's creator begins it.
    // Each member executes these steps one after the other, in the order in which they were written.
    STEP_REDUCE_WITHIN,         // a reduce-scatter or allreduce; the result to `to`
    STEP_DISTRIBUTE_WITHIN,     // an allgather or broadcast of what is at `from`
    // On codes, executed by the schedule's creator (primitive/coded.h); a code represents a range of values of the
    // vector.
    STEP_ENCODE,        // to = the code of the values
    STEP_REENCODE,      // to = the code of the combined values: COMBINE, then ENCODE (quantizes again)
    STEP_DECODE,        // final: the values from the code `from`
    STEP_COMBINE        // final: the values from several codes: those from `from` on and the own one, `other`
};

enum { STEP_WAITS = 2, STEP_NONE = -1 };

struct step {
    enum step_kind kind;
    int peer;                       // position in the group
    int after[STEP_WAITS];          // STEP_NONE: nothing
    struct location to, from, other;
    size_t nbytes;                  // at each of these locations
    struct byte_range values;       // of codes: range of the vector; within the host: what its members work on
    int number;                     // of the part; within the host, of the piece
    bool is_awaited;                // does another step wait for it?
};

// A part of a schedule. Its first steps wait for `after`; its buffers begin at these places, and its vector is there already: it
// is neither loaded nor stored.
struct schedule_part {
    int number, after;
    struct location base[BUFFER_COUNT];
};

struct schedule {
    int size, rank;                 // of the group
    struct step *steps;
    int count, capacity;
    size_t buffer_nbytes[BUFFER_COUNT];  // the end of the furthest access in each buffer
    const struct schedule_part *part;    // being written; NULL: none
    int part_begin;                      // its first step
    bool failed;                    // no memory: steps are missing
};

void schedule_init(struct schedule *schedule, int size, int rank);
void schedule_fini(struct schedule *schedule);

// Each appends a step that waits for one other (STEP_NONE: none), and returns its index.
int schedule_send(struct schedule *schedule, int peer, struct location from, size_t nbytes, int after);
int schedule_receive(struct schedule *schedule, int peer, struct location to, size_t nbytes, int after);
int schedule_load(struct schedule *schedule, struct byte_range range, int after);
int schedule_reduce(struct schedule *schedule, struct location to, struct location from, struct location other, size_t nbytes,
                    int after);
int schedule_scale(struct schedule *schedule, struct location to, size_t nbytes, int after);
int schedule_store(struct schedule *schedule, struct byte_range range, int after);
int schedule_copy(struct schedule *schedule, struct location to, struct location from, size_t nbytes, int after);
// nbytes: of one code.
int schedule_encode(struct schedule *schedule, struct location code, size_t nbytes, struct byte_range values, int after);
int schedule_reencode(struct schedule *schedule, struct location code, size_t nbytes, struct location from, struct location own,
                      struct byte_range values, int after);
int schedule_decode(struct schedule *schedule, struct location code, size_t nbytes, struct byte_range values, int after);
int schedule_combine(struct schedule *schedule, struct location from, struct location own, size_t nbytes,
                     struct byte_range values, int after);
// number: for the creator, to tell its pieces apart. values: what is reduced, or distributed.
int schedule_reduce_within(struct schedule *schedule, int number, struct location to, size_t nbytes, struct byte_range values,
                           int after);
int schedule_distribute_within(struct schedule *schedule, int number, struct location from, size_t nbytes, struct byte_range values,
                               int after);

// The steps between these two calls are a part. part: lives until schedule_end_part, which returns a step that waits for all of its
// steps.
void schedule_begin_part(struct schedule *schedule, const struct schedule_part *part);
int schedule_end_part(struct schedule *schedule);
// Writes a collective in pieces that take turns at `in_flight` places, at most SCHEDULE_PIECES_MAX: a piece begins after the one
// that had its place has ended. begin: `after` is the step after which the place is free, and the result goes to `end`, which
// returns that step. end NULL: begin returns it. With n in flight: begin 0 ... n-1, end 0, begin n, end 1, begin n+1, ...
typedef int (*schedule_piece_fn)(const void *arg, struct schedule *schedule, size_t piece, int after);
enum { SCHEDULE_PIECES_MAX = 64 };
void schedule_pieces(struct schedule *schedule, size_t pieces, size_t in_flight, schedule_piece_fn begin, schedule_piece_fn end,
                     const void *arg);
// Where more scratch memory may begin.
size_t schedule_scratch_end(const struct schedule *schedule);
// A step that waits for both. If either is STEP_NONE: returns the other.
int schedule_both(struct schedule *schedule, int one, int other);
