// Schedules of codes, shared by the primitives and their simulation.
#pragma once

#include "primitive/coded_schedules.h"
#include "primitive/encoder.h"
#include "primitive/primitive.h"

// The codes of a primitive on a vector of `nbytes`, whose participants are `size` ranks or hosts, in slots in scratch memory.
// peers: of a decentralized one; NULL for C_LP_S.
struct codes coded_of(const struct collective *coll, size_t nbytes, int size, const struct peers *peers,
                      const struct network_cost *network);
// Writes its schedule.
void coded_schedule(struct schedule *schedule, const struct collective *coll, const struct codes *codes, const struct peers *peers);
static inline bool coded_scatters(const struct collective *coll)
{
    return coll->kind == BHVD_C_LP_S && coll->exchange == BHVD_EXCHANGE_SCATTER_GATHER;
}

// For codes that a GPU has encoded, and will decode.
void coded_on_gpu(struct codes *codes, const struct gpu_codes *gpu, struct operands *operands);

// Scratch memory of one step on a segment, besides the encoder's.
struct coded_scratch {
    void *values;               // in the dtype; for executor_release. NULL: out of memory, and the executor has failed
    float *floats;
};

struct coded_scratch coded_acquire(struct executor *exec, struct encoder *encoder, const struct codes *codes, size_t floats);
