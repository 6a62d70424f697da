// The key of an operation on all ranks, and what is special about each kind of operation.
#pragma once

#include <string.h>

#include "bagua_hvd.h"
#include "base/bytes.h"
#include "base/containers.h"

enum { OPERATION_KINDS = BHVD_PROCESS_SET_REMOVE + 1 };

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
