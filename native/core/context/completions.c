// One list serves one thread that takes from it and any number that add. An operation whose completion is in the list or
// on its way into it holds a reference, so that the list may be destroyed while operations are in flight.
#include "core/context/completions.h"

#include <pthread.h>
#include <stdlib.h>

#include "base/clock.h"
#include "base/futex.h"
#include "base/status.h"
#include "core/context/operation.h"

struct completion {
    struct completion *next;
    bhvd_completions *list;
    int64_t number;
};

struct bhvd_completions {
    atomic_int references;
    pthread_mutex_t lock;
    struct completion *first, **last;   // ended, in this order
    _Atomic uint32_t awaited;           // futex word: 1 while somebody sleeps until the list is not empty
};

bhvd_completions *bhvd_completions_create(void)
{
    bhvd_completions *list = calloc(1, sizeof *list);
    if (!list)
        return NULL;
    atomic_init(&list->references, 1);
    atomic_init(&list->awaited, 0);
    pthread_mutex_init(&list->lock, NULL);
    list->last = &list->first;
    return list;
}

static struct completion *take(bhvd_completions *list)
{
    pthread_mutex_lock(&list->lock);
    struct completion *completion = list->first;
    if (completion) {
        list->first = completion->next;
        if (!list->first)
            list->last = &list->first;
    }
    pthread_mutex_unlock(&list->lock);
    return completion;
}

static void drop(bhvd_completions *list)
{
    if (atomic_fetch_sub(&list->references, 1) != 1)
        return;
    for (struct completion *completion; (completion = take(list));)
        free(completion);
    pthread_mutex_destroy(&list->lock);
    free(list);
}

static void put(struct completion *completion)
{
    bhvd_completions *list = completion->list;
    completion->next = NULL;
    pthread_mutex_lock(&list->lock);
    *list->last = completion;
    list->last = &completion->next;
    pthread_mutex_unlock(&list->lock);
    if (atomic_exchange(&list->awaited, 0))
        futex_wake_all(&list->awaited);
    drop(list);
}

void completions_operation_ended(bhvd_handle *op)
{
    if (!atomic_load(&op->completion))
        return;                         // as mostly
    struct completion *completion = atomic_exchange(&op->completion, NULL);
    if (completion)
        put(completion);
}

static struct completion *create(bhvd_completions *list, int64_t number)
{
    struct completion *completion = malloc(sizeof *completion);
    if (completion) {
        *completion = (struct completion){NULL, list, number};
        atomic_fetch_add(&list->references, 1);
    }
    return completion;
}

bhvd_status bhvd_completions_add(bhvd_completions *list, bhvd_handle *op, int64_t number)
{
    struct completion *none = NULL, *completion = create(list, number);
    if (!completion)
        return BHVD_ERR_SYSTEM;
    if (!atomic_compare_exchange_strong(&op->completion, &none, completion)) {
        free(completion);
        drop(list);
        return BHVD_ERR_ARGUMENT;
    }
    // Either this thread or the one that ends the operation finds the other's mark.
    if (operation_is_over(op))
        completions_operation_ended(op);
    return BHVD_OK;
}

bhvd_status bhvd_completions_put(bhvd_completions *list, int64_t number)
{
    struct completion *completion = create(list, number);
    if (!completion)
        return BHVD_ERR_SYSTEM;
    put(completion);
    return BHVD_OK;
}

int64_t bhvd_completions_next(bhvd_completions *list, int timeout_ms)
{
    const int64_t deadline_ns = clock_deadline_ns(timeout_ms);
    struct completion *completion;
    while (!(completion = take(list))) {
        atomic_store(&list->awaited, 1);
        if ((completion = take(list)))  // put before it could see the mark
            break;
        futex_wait(&list->awaited, 1, deadline_ns);
        if (timeout_ms >= 0 && clock_now_ns() >= deadline_ns && !(completion = take(list)))
            return -1;
        if (completion)
            break;
    }
    int64_t number = completion->number;
    free(completion);
    return number;
}

void bhvd_completions_destroy(bhvd_completions *list)
{
    if (list)
        drop(list);
}
