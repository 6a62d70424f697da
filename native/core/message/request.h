// A request: a rank's description of a posted operation for the coordinator. Wire format, all bounds checked:
//
//     u32 process set's number, u16 name size, name, u8 kind, u8 op, u8 codec, f64 codec parameter, u8 exchange,
//     u8 topology, i64 round, u8 hierarchical, u8 on a GPU, i64 root rank, f64 prescale, f64 postscale,
//     u32 tensors, for each: u8 dtype, u8 ndim, i64 dims[ndim];  u32 splits, i64 splits[]
#pragma once

#include <stdint.h>
#include <string.h>

#include "bagua_hvd.h"
#include "base/bytes.h"
#include "base/containers.h"

enum { OPERATION_KINDS = BHVD_PROCESS_SET_REMOVE + 1 };

// What is special about a kind of operation.
struct operation_traits {
    const char *name, *word;    // in messages: "ALLREDUCE" and "Allreduce"
    bool has_tensors;
    bool has_one_dtype;         // of all its tensors
    bool is_of_all;             // it runs over all ranks, not over a process set
    bool changes_sets;          // a second one of the same name is another operation, and nothing runs beside it
};
extern const struct operation_traits OPERATION_TRAITS[OPERATION_KINDS];

// "ALLREDUCE", or "ADASUM".
const char *operation_kind_name(bhvd_kind kind, bhvd_op op);

// The key of an operation on all ranks.
struct operation_key {
    uint32_t process_set;       // its number, which is never reused
    uint16_t name_size;
    const char *name;
};

static inline uint64_t operation_hash(const struct operation_key *key)
{
    return table_hash(key->name, key->name_size, key->process_set);
}

static inline bool operation_key_equals(const struct operation_key *a, const struct operation_key *b)
{
    return a->process_set == b->process_set && a->name_size == b->name_size && memcmp(a->name, b->name, a->name_size) == 0;
}

// Reads the name: its size, then its characters, which are not copied.
static inline struct operation_key operation_key_take(struct bytes_reader *r, uint32_t process_set)
{
    const uint16_t name_size = bytes_take_u16(r);
    return (struct operation_key){process_set, name_size, (const char *)bytes_take(r, name_size)};
}

// Maximum number of elements of a tensor: products with element sizes stay far from overflow.
#define OPERATION_COUNT_MAX (1LL << 56)
// The number of elements with one more dimension, after `count` so far, as the product of dimensions other than 0: so it is bounded
// even if another dimension is 0. -1: too many, or negative.
static inline int64_t operation_count(int64_t count, int64_t dim)
{
    return dim < 0 || __builtin_mul_overflow(count, dim ? dim : 1, &count) || count > OPERATION_COUNT_MAX ? -1 : count;
}

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
    struct bhvd_args args;          // what the message has, without pointers; device: 0 for any GPU
    const unsigned char *splits;    // i64, unaligned
    size_t size;                    // of bytes
    unsigned char *bytes;           // the message
    struct request_tensor tensors[];    // args.tensor_count
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
// How many numbers the response adds for each tensor.
static inline size_t response_count(bhvd_kind kind, int set_size)
{
    return kind == BHVD_ALLGATHER ? (size_t)set_size : kind == BHVD_ALLTOALL ? (size_t)set_size + 1 : 0;
}

// BHVD_OK if two ranks request the same operation; else BHVD_ERR_MISMATCH with Horovod's message and the differences.
bhvd_status request_compare(const struct request *one, int one_rank, const struct request *other, int other_rank,
                            struct bhvd_error *error);
