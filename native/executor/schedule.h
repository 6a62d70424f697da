// A schedule: one rank's part in a collective over links, as a list of typed steps, each with the steps that it waits for.
//
//     write      by one short function per algorithm (collective/), which knows only the group's size, this rank's position and
//                the number of bytes: so every rank's schedule can be written anywhere
//     read       by the executor (plan.h), which runs many at once; by the checker of tests/native/test_schedules.c; by the
//                simulator (simulator.h)
//
// Messages between two ranks are numbered in the order in which each writes them: the k-th send of one is the k-th receive of
// the other. A step waits only for earlier ones of its list, so a schedule cannot deadlock by itself.
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { SCHEDULE_SEGMENT = 256 * 1024 };     // bytes per message: reduction of one overlaps with transfer of another

// Cost of communication between hosts, equal on all ranks of an execution: a hop; a byte in picoseconds; 0: unknown.
struct wire {
    uint32_t hop_ns, byte_ps;
};

// Cost of a byte; if unknown, that of 10 Gbit/s.
static inline double wire_byte_ps(const struct wire *wire) { return wire->byte_ps ? wire->byte_ps : 900; }

// The memory that a place is in.
enum space {
    IN_INPUT,           // the operation's tensor; not written
    IN_OUTPUT,          // its result
    IN_VECTOR,          // the fused tensors of an allreduce, as one
    IN_SCRATCH,
    SPACE_COUNT
};

struct place {
    enum space space;
    size_t at;          // bytes
};

static inline struct place in_space(enum space space, size_t at) { return (struct place){space, at}; }

// A range of bytes, and its division into segments.
struct part {
    size_t begin, nbytes;
};

// Segment `index` of the part; nbytes 0: it has no such segment.
static inline struct part part_segment(struct part part, size_t index)
{
    const size_t offset = index * SCHEDULE_SEGMENT;
    if (offset >= part.nbytes)
        return (struct part){part.begin + part.nbytes, 0};
    const size_t left = part.nbytes - offset;
    return (struct part){part.begin + offset, left < SCHEDULE_SEGMENT ? left : SCHEDULE_SEGMENT};
}

enum step_kind {
    STEP_SEND,          // `from` to the peer
    STEP_RECEIVE,       // from the peer into `to`
    STEP_LOAD,          // the tensors' values into this part of the vector, prescaled
    STEP_REDUCE,        // to = from + other
    STEP_SCALE,         // to = to * postscale
    STEP_STORE,         // final: this part of the vector to the tensors
    STEP_COPY,          // to = from
    STEP_NOTHING,       // does nothing: joins two dependencies into one
    // On codes, executed by the schedule's creator (primitive/schedules.h); a code represents a range of values of the vector.
    STEP_ENCODE,        // to = the code of the values
    STEP_RECODE,        // to = the code of the combined values: COMBINE, then ENCODE
    STEP_DECODE,        // final: the values from the code `from`
    STEP_COMBINE        // final: the values from several codes: those from `from` on and the own one, `other`
};

enum { STEP_WAITS = 2, STEP_NONE = -1 };

struct step {
    enum step_kind kind;
    int peer;                       // position in the group
    int after[STEP_WAITS];          // STEP_NONE: nothing
    struct place to, from, other;
    size_t nbytes;                  // of each of these places
    struct part values;             // range of the vector; for codes only
};

struct schedule {
    int size, rank;                 // of the group
    struct step *steps;
    int count, capacity;
    size_t space_nbytes[SPACE_COUNT];   // the end of the furthest access in each space
    bool failed;                    // no memory: steps are missing
};

void schedule_init(struct schedule *schedule, int size, int rank);
void schedule_fini(struct schedule *schedule);

// Each appends a step that waits for one other (STEP_NONE: none), and returns its index.
int schedule_send(struct schedule *schedule, int peer, struct place from, size_t nbytes, int after);
int schedule_receive(struct schedule *schedule, int peer, struct place to, size_t nbytes, int after);
int schedule_load(struct schedule *schedule, struct part part, int after);
int schedule_reduce(struct schedule *schedule, struct place to, struct place from, struct place other, size_t nbytes, int after);
int schedule_scale(struct schedule *schedule, struct place to, size_t nbytes, int after);
int schedule_store(struct schedule *schedule, struct part part, int after);
int schedule_copy(struct schedule *schedule, struct place to, struct place from, size_t nbytes, int after);
// nbytes: of one code.
int schedule_encode(struct schedule *schedule, struct place code, size_t nbytes, struct part values, int after);
int schedule_recode(struct schedule *schedule, struct place code, size_t nbytes, struct place from, struct place own,
                    struct part values, int after);
int schedule_decode(struct schedule *schedule, struct place code, size_t nbytes, struct part values, int after);
int schedule_combine(struct schedule *schedule, struct place from, struct place own, size_t nbytes, struct part values, int after);
// A step that waits for both. If either is STEP_NONE: returns the other.
int schedule_both(struct schedule *schedule, int one, int other);
