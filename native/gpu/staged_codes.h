// C_LP_S and D_LP_S on GPU tensors through the host, encoded and decoded by the GPU: only codes cross the link to the GPU.
//
//     posted      stream to_host packs and encodes the tensors, copies the codes to pinned memory, records `ready`
//     executed    codes are sent over the CPU transports; C_LP_S: a rank's own chunk is averaged and encoded on the CPU
//     ended       stream from_host copies the result's codes to the GPU, decodes, unpacks, records `done`;
//                 D_LP_S: those of the neighbors, which it adds to the replicas on the device (gpu/device_copy.h)
//
// Otherwise as in gpu/staging.h. Ranks send the same bytes as when the host encodes, so each rank chooses independently.
#pragma once

#include "gpu/device_encoder.h"
#include "primitive/peers.h"
#include "primitive/primitive.h"

struct bhvd_device_array;

struct staged_codes {
    struct device_encoder encoder;
    struct code_layout layout;          // of the rank's own codes
    int ranks;
    struct gpu_codes pinned;            // results: means of chunks, values of all ranks, or (D_LP_S) of peers
    size_t results_nbytes;              // of all results
    struct peers peers;                 // D_LP_S: the senders of `results`
    struct device_buffer *on_device;    // D_LP_S: own codes on the device, followed by memory for the peers'; else NULL
    struct device_buffer *residual;     // the worker's new residual, valid when this has ended; NULL: no error feedback
};

// Whether this operation can be done this way. is_hierarchical: it works between hosts only, on means that the CPU computes.
bool staged_codes_apply(const struct collective *coll, bool is_hierarchical);
// Instead of staging_create. set_size, rank: of the operation's process set.
bhvd_status staged_codes_create(struct collective *coll, const struct kernel_table *kernels, int set_size, int rank,
                                struct bhvd_error *error);
// Instead of staging_end.
bhvd_status staged_codes_end(struct collective *coll, struct bhvd_error *error);
void staged_codes_destroy(struct collective *coll);  // before staging_destroy

// Encodes with the residuals of a device copy; *residual receives the new ones. device_copy NULL: no error feedback.
int staged_codes_encode(const struct device_encoder *encoder, struct encoding *encoding, struct bhvd_device_array *device_copy,
                        struct device_buffer **residual, struct device_scratch *scratch);

// D_LP_S: its replicas += D(their codes), which are one after the other on the device: the own one, then those of the peers.
int staged_codes_add(const struct collective *coll, const struct device_encoder *encoder, const struct code_layout *layout,
                     const struct peers *peers, const unsigned char *on_device, void *stream);

// D_LP_S, if it mixes before: mixes the input of the encoder from the tensors' values at *values; sets *values to other memory.
int staged_codes_mix(const struct collective *coll, const struct device_encoder *encoder, struct device_scratch *scratch,
                     void **values);
// D_LP_S, if it mixes afterwards: mixes the results from values and replicas, and stores them.
int staged_codes_mix_results(const struct collective *coll, const struct device_encoder *encoder, struct device_scratch *scratch,
                             const void *values);

// The tensors of an operation as one vector on the device: a single tensor in place, or scratch memory, which one launch copies the
// tensors to or from; not to results on the host.
int staged_codes_pack(const struct collective *coll, struct device_scratch *scratch, void **out);
int staged_codes_target(const struct collective *coll, struct device_scratch *scratch, void **out);
int staged_codes_unpack(const struct collective *coll, struct device_scratch *scratch, void *vector);
