// What runs C_LP_S (c_lp_s.c), and the two kinds of ends of it: where the codes of a rank's own values come from, and where
// those that make up the result go. In between, from sending codes to encoding means, both are the same.
//
//     host    c_lp_s_host.c     values are encoded here, and codes decoded to the results
//     others  of the caller     a GPU has encoded the values when they were posted, and decodes the result afterwards
#ifndef BHVD_C_LP_S_H
#define BHVD_C_LP_S_H

#include "primitive/encoder.h"
#include "primitive/primitive.h"
#include "run/fusion.h"
#include "transport/link.h"

enum { C_LP_S_WINDOW = 3 };     // segments in flight

struct slot {
    unsigned char *sent, *received;     // n codes each, by rank
    const unsigned char *own;           // this rank's own code, where others' are in `received`
    struct transfer *scatter, *gather;  // n sends, then n receives, by rank; those not used are done
};

struct exchange;

// k: the chunk, or, where all codes go to all ranks (ALLGATHER), the rank; s: the segment.
struct code_ends {
    // The code of a part of the rank's own values: where it lies, or made in `room`.
    unsigned char *(*own)(struct exchange *x, int k, size_t s, struct segment_part part, unsigned char *room);
    // Where a code that the result is made of is to be put.
    unsigned char *(*room)(struct exchange *x, struct slot *slot, int k, size_t s);
    // SCATTER_GATHER: the code of a part of the result is there.
    void (*store)(struct exchange *x, struct segment_part part, const unsigned char *code);
    // ALLGATHER: the codes of a part come to the slot from all ranks. Waits for them.
    bhvd_status (*average)(struct exchange *x, struct slot *slot, struct segment_part part);
};

struct exchange {
    struct run *run;
    struct group *group;
    const struct code_ends *ends;
    const void *arg;                    // of those ends, where they are not the host's
    const struct span_list *list;       // of those of the host; else NULL
    struct encoder encoder;
    struct segments cut;
    size_t element;
    size_t begin;                       // of the vector in the operation's, for seeds
    size_t stride;                      // of the longest segment: encoded bytes
    double prescale, factor;            // factor: what the sum is multiplied by
    float *worker_error, *server_error;
    unsigned char *result;              // one segment in the dtype
    float *sum;                         // one segment
    struct slot slots[C_LP_S_WINDOW];
};

extern const struct code_ends c_lp_s_host;

static inline unsigned char *sent_at(const struct exchange *x, const struct slot *slot, int i)
{
    return slot->sent + (size_t)i * x->stride;
}

static inline unsigned char *received_at(const struct exchange *x, const struct slot *slot, int i)
{
    return slot->received + (size_t)i * x->stride;
}

bhvd_status c_lp_s_wait_received(struct exchange *x, struct transfer *transfers, int from);
// sum = factor * sum_i D(code of rank i), in rank order, as the codes come
bhvd_status c_lp_s_sum(struct exchange *x, const struct slot *slot, struct transfer *transfers, size_t count);

#endif
