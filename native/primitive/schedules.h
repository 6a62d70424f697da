// What the primitives do over links, as schedules (run/schedule.h). What travels are codes: each stands for the values of a segment,
// encoded by a codec, or (D_FP_S) as they are.
//
// Segments are worked on side by side, so that one is on the wire while another is encoded, and a third decoded.
#pragma once

#include "kernel/segments.h"
#include "run/schedule.h"

// Code k of segment s lies at `at` + k * each + s * segment; in slots: s modulo their number.
struct code_lay {
    enum space space;
    size_t at, each, segment;
    bool in_slots;
};

enum { PLAIN_SEGMENT_NBYTES = 128 * 1024 };     // of values that travel as they are

struct codes {
    struct segments cut;                                // of the vector's elements
    size_t element;                                     // bytes
    size_t (*size)(const void *arg, size_t count);      // bytes of the code of so many elements
    const void *arg;
    size_t slots;                                       // segments worked on at once, at least 1
    struct code_lay own, received, results;
    bool encodes;               // else the own codes are there already
    bool decodes;               // else the codes of the result are received to `results`, and that is all
};

// For codes made and decoded here: slots in scratch memory, in which each segment has `own` codes of the rank itself and `received`
// ones of others, of at most `longest` bytes. wire: for how many slots.
void codes_in_scratch(struct codes *codes, size_t own, size_t received, size_t longest, const struct wire *wire);

// C_LP_S by owners. Chunk k of the vector belongs to rank k, which receives its code from everyone, recodes, and sends what that
// makes to everyone. own, received, results: k is the rank whose chunk it is, or that sent it.
void schedule_scatter_gather(struct schedule *schedule, const struct codes *codes);

// Everyone sends the code of its whole vector, one chunk, to its peers, and combines it with theirs. own: k is 0. received, results: k
// is the place among the peers. peers NULL: everyone, in rank order; this rank's place is left out.
void schedule_exchange(struct schedule *schedule, const struct codes *codes, const int *peers, int count);
