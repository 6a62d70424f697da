// A request: a rank's description of a posted operation for the coordinator. Wire format, all bounds checked:
//
//     u32 process set's number, u16 name size, name, u8 kind, u8 op, u8 codec, f64 codec parameter, u8 exchange,
//     u8 topology, i64 round, u8 hierarchical, i64 device, i64 root rank, f64 prescale, f64 postscale,
//     u32 tensors, for each: u8 dtype, u8 ndim, i64 dims[ndim];  u32 splits, i64 splits[]
#pragma once

#include <stdint.h>

#include "base/bytes.h"
#include "core/message/operation_key.h"

enum {
    REQUEST_NAME_MAX = 65535,
    REQUEST_NDIM_MAX = 255,
    REQUEST_BYTES_MAX = 32 << 20,       // fits into a frame together with its header (transport/link.h)
    REQUEST_TENSORS_MAX = REQUEST_BYTES_MAX / 2
};

struct request_tensor {
    bhvd_dtype dtype;
    uint8_t ndim;
    const unsigned char *dims;      // i64, unaligned: request_dim
};

// A parsed request; shared by a pending negotiation and a cache entry.
struct request {
    int references;
    struct operation_key key;       // name inside bytes
    bhvd_kind kind;
    bhvd_op op;
    bhvd_codec codec;
    double codec_parameter;
    bhvd_exchange exchange;
    bhvd_topology topology;
    bool hierarchical, on_gpu;
    int64_t round, root_rank;
    double prescale_factor, postscale_factor;
    uint32_t split_count;
    const unsigned char *splits;    // i64, unaligned
    size_t size;                    // of bytes
    unsigned char *bytes;           // the message
    uint32_t tensor_count;
    struct request_tensor tensors[];
};

void request_write(struct bytes *out, uint32_t process_set, const struct bhvd_args *args);
// Copies the bytes. BHVD_ERR_PROTOCOL: malformed; BHVD_ERR_SYSTEM: no memory. Then *out is NULL.
bhvd_status request_parse(const unsigned char *bytes, size_t size, struct request **out);
// Reads only the key, whose name points into the bytes. False: malformed.
bool request_read_key(const unsigned char *bytes, size_t size, struct operation_key *key);
void request_retain(struct request *request);
void request_release(struct request *request);

// The shape as text, such as "[17, 17]".
void request_format_shape(char *out, size_t size, const struct request_tensor *tensor);

bool request_is_speculative(const struct request *request);     // no call waits for it yet; see bhvd_kind
int64_t request_dim(const struct request_tensor *tensor, int i);
int64_t request_split(const struct request *request, uint32_t i);
size_t request_nbytes(const struct request *request);
// Do only the members of a new process set request it? The other ranks take part without requesting it.
bool request_is_of_members(const struct request *request);
// Do the splits, which are the ranks of a process set, contain the rank?
bool request_lists(const struct request *request, int rank);

// BHVD_OK if two ranks request the same operation; else BHVD_ERR_MISMATCH with Horovod's message and the differences.
bhvd_status request_compare(const struct request *one, int one_rank, const struct request *other, int other_rank,
                            struct bhvd_error *error);
