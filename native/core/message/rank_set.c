#include "core/message/rank_set.h"

#include <stdlib.h>

static size_t word_count(const struct rank_set *set) { return ((size_t)set->size + 63) / 64; }

bool rank_set_init(struct rank_set *set, int size)
{
    set->size = size;
    set->words = calloc(word_count(set), sizeof *set->words);
    return set->words != NULL;
}

void rank_set_fini(struct rank_set *set)
{
    free(set->words);
    set->words = NULL;
}

void rank_set_clear(struct rank_set *set) { memset(set->words, 0, word_count(set) * sizeof *set->words); }

void rank_set_copy(struct rank_set *set, const struct rank_set *other)
{
    memcpy(set->words, other->words, word_count(set) * sizeof *set->words);
}

void rank_set_unite(struct rank_set *set, const struct rank_set *other)
{
    for (size_t i = 0; i < word_count(set); i++)
        set->words[i] |= other->words[i];
}

void rank_set_intersect(struct rank_set *set, const struct rank_set *other)
{
    for (size_t i = 0; i < word_count(set); i++)
        set->words[i] &= other->words[i];
}

bool rank_set_is_empty(const struct rank_set *set) { return rank_set_next(set, 0) < 0; }

bool rank_set_equals(const struct rank_set *set, const struct rank_set *other)
{
    return memcmp(set->words, other->words, word_count(set) * sizeof *set->words) == 0;
}

bool rank_set_overlaps(const struct rank_set *set, const struct rank_set *other)
{
    uint64_t common = 0;
    for (size_t i = 0; i < word_count(set); i++)
        common |= set->words[i] & other->words[i];
    return common;
}

bool rank_set_contains(const struct rank_set *set, const struct rank_set *other)
{
    for (size_t i = 0; i < word_count(set); i++) {
        if (other->words[i] & ~set->words[i])
            return false;
    }
    return true;
}

int rank_set_next(const struct rank_set *set, int rank)
{
    while (rank < set->size) {
        uint64_t rest = set->words[rank / 64] >> rank % 64;
        if (rest)
            return rank + __builtin_ctzll(rest);
        rank = (rank / 64 + 1) * 64;
    }
    return -1;
}

void rank_set_put(struct bytes *out, const struct rank_set *set)
{
    size_t count_at = out->size;
    uint32_t ranges = 0;
    bytes_put_u32(out, 0);
    for (int first = rank_set_next(set, 0), end; first >= 0; first = rank_set_next(set, end)) {
        end = first + 1;
        while (end < set->size && rank_set_has(set, end))
            end++;
        bytes_put_u32(out, (uint32_t)first);
        bytes_put_u32(out, (uint32_t)(end - first));
        ranges++;
    }
    if (!out->failed)
        memcpy(out->data + count_at, &ranges, sizeof ranges);
}

void rank_set_take(struct bytes_reader *r, struct rank_set *set)
{
    uint32_t ranges = bytes_take_u32(r);
    int64_t end = -1;                   // so the first range may begin at 0, and ranges never touch
    rank_set_clear(set);
    for (uint32_t i = 0; i < ranges && !r->failed; i++) {
        int64_t first = bytes_take_u32(r), count = bytes_take_u32(r);
        r->failed |= first <= end || count == 0 || first + count > set->size;
        end = first + count;
        for (int64_t rank = first; rank < end && !r->failed; rank++)
            rank_set_add(set, (int)rank);
    }
}
