// What names an operation on all ranks, and how messages name its kind.
#pragma once

#include <string.h>

#include "bagua_hvd.h"
#include "base/table.h"

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

// Elements of one tensor at most: products with element sizes stay far from overflow.
#define OPERATION_COUNT_MAX (1LL << 56)
// Of `count` elements so far, with one more dimension: the product of those that are not 0, so that all others are possible
// too, whichever is 0. -1: impossible.
static inline int64_t operation_count(int64_t count, int64_t dim)
{
    return dim < 0 || __builtin_mul_overflow(count, dim ? dim : 1, &count) || count > OPERATION_COUNT_MAX ? -1 : count;
}
bool operation_needs_tensors(bhvd_kind kind);

// The kind's word in error messages: "ALLREDUCE" and "Allreduce".
const char *operation_kind_name(bhvd_kind kind, bhvd_op op);
const char *operation_kind_word(bhvd_kind kind);
