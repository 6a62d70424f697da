// The primitives over links, as schedules (executor/schedule.h). Ranks exchange codes: each is the values of a segment, encoded
// by a codec, or (D_FP_S) unencoded.
//
// Segments overlap: one is on the wire while another is encoded and a third decoded.
#pragma once

#include "executor/schedule.h"
#include "primitive/encoder.h"
#include "primitive/primitive.h"

// Code k of segment s is at `at` + k * each + s * segment; in the scratch buffer s modulo the number of slots.
struct code_lay {
    enum buffer_kind buffer;
    size_t at, each, segment;
};

enum { PLAIN_SEGMENT_NBYTES = 128 * 1024 };     // of values that are sent unencoded

// Who gets the codes; what k is.
enum code_pattern {
    // C_LP_S by owners. Chunk k of the vector belongs to rank k, which receives its code from all ranks, reencodes, and sends the
    // result to all. own, received, results: k is the rank that owns the chunk, or that sent it.
    CODES_TO_OWNERS,
    // Each rank sends the code of its whole vector, one chunk, to all others or to its peers, and combines it with theirs. own: k
    // is 0. received, results: k is the rank, or the index of the peer.
    CODES_TO_ALL,
    CODES_TO_PEERS
};

struct codes {
    enum code_pattern pattern;
    struct peers peers;                                 // CODES_TO_PEERS
    struct segments cut;                                // of the vector's elements
    size_t element;                                     // bytes
    bhvd_codec codec;                                   // BHVD_CODEC_NONE: the codes are the values
    bhvd_dtype dtype;
    struct bhvd_codec_options options;
    size_t slots;                                       // segments in flight, at least 1
    struct code_lay own, received, results;
    bool encodes;               // otherwise the own codes exist already
    bool decodes;               // otherwise the codes of the result are only received into `results`
};

// The codes of a primitive on a vector of `nbytes`, as participant `rank` of `size` ranks or hosts, made and decoded here, in slots
// in scratch memory. network: determines the number of slots.
struct codes coded_of(const struct collective *coll, size_t nbytes, int size, int rank, const struct network_cost *network);
// Its part: lays out the slots of codes that are otherwise complete.
void coded_in_scratch(struct codes *codes, int size, const struct network_cost *network);
// Writes their schedule.
void coded_schedule(struct schedule *schedule, const struct codes *codes);

// For codes that a GPU has encoded, and will decode.
void coded_on_gpu(struct codes *codes, const struct gpu_codes *gpu, struct operands *operands);

// Scratch memory of one step on a segment, besides the encoder's.
struct coded_scratch {
    void *values;               // in the dtype; for executor_release. NULL: out of memory, and the executor has failed
    float *floats;
};

struct coded_scratch coded_acquire(struct executor *exec, struct encoder *encoder, const struct codes *codes, size_t floats);
