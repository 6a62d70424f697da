// Any number of threads add to a list and take from it. A completion that is in the list or will be put
// into it holds a reference to it, so that the list may be destroyed while operations are in progress.
#include "core/context/completions.h"

#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>

#include "base/clock.h"
#include "base/containers.h"
#include "base/thread.h"

struct completion {
    struct completion *next;
    bhvd_completions *list;
    int64_t number;
};

struct bhvd_completions {
    atomic_int references;
    pthread_mutex_t lock;
    _Atomic uint32_t added;             // numbers added; the sleepers' futex
    int sleepers;                       // threads that wait until the list is not empty
    struct FIFO(struct completion) ended;
};

bhvd_completions *bhvd_completions_create(void)
{
    bhvd_completions *list = calloc(1, sizeof *list);
    if (!list)
        return NULL;
    atomic_init(&list->references, 1);
    pthread_mutex_init(&list->lock, NULL);
    return list;
}

static void release(bhvd_completions *list)
{
    if (atomic_fetch_sub(&list->references, 1) != 1)
        return;
    for (struct completion *completion; (completion = fifo_take(&list->ended, next));)
        free(completion);
    pthread_mutex_destroy(&list->lock);
    free(list);
}

static void put(struct completion *completion)
{
    bhvd_completions *list = completion->list;
    pthread_mutex_lock(&list->lock);
    fifo_put(&list->ended, completion, next);
    list->added++;
    const bool has_sleepers = list->sleepers;
    pthread_mutex_unlock(&list->lock);
    if (has_sleepers)
        futex_wake_all(&list->added);
    release(list);
}

void completions_signal(struct completion *_Atomic *slot)
{
    if (!atomic_load(slot))
        return;                         // the usual case
    struct completion *completion = atomic_exchange(slot, NULL);
    if (completion)
        put(completion);
}

bhvd_status completions_add(struct completion *_Atomic *slot, bhvd_completions *list, int64_t number)
{
    struct completion *none = NULL, *completion = malloc(sizeof *completion);
    if (!completion)
        return BHVD_ERR_SYSTEM;
    *completion = (struct completion){NULL, list, number};
    atomic_fetch_add(&list->references, 1);
    if (atomic_compare_exchange_strong(slot, &none, completion))
        return BHVD_OK;
    free(completion);
    release(list);
    return BHVD_ERR_ARGUMENT;
}

int64_t bhvd_completions_next(bhvd_completions *list, int timeout_ms)
{
    const int64_t deadline_ns = clock_deadline_ns(timeout_ms);
    pthread_mutex_lock(&list->lock);
    list->sleepers++;
    while (!list->ended.head && clock_now_ns() < deadline_ns) {
        const uint32_t added = list->added;
        pthread_mutex_unlock(&list->lock);
        futex_wait(&list->added, added, deadline_ns);
        pthread_mutex_lock(&list->lock);
    }
    list->sleepers--;
    struct completion *completion = fifo_take(&list->ended, next);
    pthread_mutex_unlock(&list->lock);
    int64_t number = completion ? completion->number : -1;
    free(completion);
    return number;
}

void bhvd_completions_destroy(bhvd_completions *list)
{
    if (list)
        release(list);
}
