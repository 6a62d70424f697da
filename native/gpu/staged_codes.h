// C_LP_S and D_LP_S on tensors of a GPU by way of the host, with the GPU encoding and decoding: only codes cross the link.
//
//     posted      stream to_host packs and encodes the tensors, copies the codes to pinned memory, records `ready`
//     executed    codes travel over the CPU transports; C_LP_S: a rank's own chunk is averaged and encoded on the CPU
//     ended       stream from_host takes the result's codes to the GPU, decodes, unpacks, records `done`;
//                 D_LP_S: that of the neighbors' codes, and adds to the replicas, which lie there (gpu/device_copy.h)
//
// Everything else is as in gpu/staging.h. What travels is the same as when the host encodes, so each rank chooses by itself.
#pragma once

#include "gpu/device_encoder.h"
#include "primitive/peers.h"
#include "primitive/primitive.h"

struct bhvd_device_array;

struct staged_codes {
    struct device_encoder encoder;
    struct code_layout layout;          // of the rank's own codes
    int ranks;
    unsigned char *own;                 // codes in pinned memory,
    unsigned char *results;             // and those of which the result is made: chunks' means, or values of all ranks, or
    size_t results_nbytes;              // D_LP_S: of peers,
    struct peers peers;                 // whose they are,
    struct device_buffer *on_device;    // and its own codes on the device, with room for theirs behind; else NULL
    struct device_buffer *lost;         // what the worker's errors are when this has ended; NULL: none are fed back
};

// Can this operation be done so here? is_hierarchical: it works between hosts only, on means that the host computes.
bool staged_codes_take(const struct work *work, const struct bhvd_args *args, bool is_hierarchical);
// In place of staging_create. set_size, rank: of the operation's process set.
bhvd_status staged_codes_create(struct work *work, const struct kernel_table *kernels,
                                const struct bhvd_args *args, int set_size, int rank, struct bhvd_error *error);
// In place of staging_end.
bhvd_status staged_codes_end(struct work *work, struct bhvd_error *error);
void staged_codes_destroy(struct work *work);      // before staging_destroy

// Where the primitives find these codes.
static inline struct ready_codes staged_codes_ready(const struct staged_codes *codes)
{
    return (struct ready_codes){codes->own, codes->results, codes->layout.chunk_stride, codes->layout.segment_stride};
}

// Encodes with the errors of a device copy, whose new ones come to *lost. device_copy NULL: none are fed back.
int staged_codes_encode(const struct device_encoder *encoder, struct encoding *encoding, struct bhvd_device_array *device_copy,
                        struct device_buffer **lost, struct device_scratch *scratch);

// D_LP_S: its replicas += D(their codes), which lie one behind the other on the device: the own one, then those of the peers.
int staged_codes_add(const struct work *work, const struct device_encoder *encoder, const struct code_layout *layout,
                     const struct peers *peers, const unsigned char *on_device, void *stream);

// D_LP_S: what is encoded, of the tensors' values, which lie at *values and may be mixed to somewhere else.
int staged_codes_mix(const struct work *work, const struct device_encoder *encoder, struct device_scratch *scratch,
                     void **values);
// And the results of values and replicas, to where they belong.
int staged_codes_mix_results(const struct work *work, const struct device_encoder *encoder, struct device_scratch *scratch,
                             const void *values);

// The tensors of an operation as one vector on the device, whose places `staging` knows: the only one where it lies, or scratch
// memory, to and from which the tensors are copied in one launch; not to results on the host.
int staged_codes_pack(const struct work *work, struct device_scratch *scratch, void **out);
int staged_codes_target(const struct work *work, struct device_scratch *scratch, void **out);
int staged_codes_unpack(const struct work *work, struct device_scratch *scratch, void *vector);
