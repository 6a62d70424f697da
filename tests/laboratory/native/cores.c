// The distance between two cores: the time from one core's write to the other's read. On a virtual machine that time can change
// by a factor of six without notice, when its host moves a virtual processor to another part of the chip; so does all traffic
// between ranks in shared memory.
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>

#include "base/clock.h"

enum { ROUNDS = 2000, WARM_UP = 200 };

struct ball {
    _Alignas(64) atomic_int at;     // the player whose turn it is
    int cores[2];
};

static void stay_on(int core)
{
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(core, &set);
    pthread_setaffinity_np(pthread_self(), sizeof set, &set);
}

static void play(struct ball *ball, int player, int rounds)
{
    for (int i = 0; i < rounds; i++) {
        while (atomic_load_explicit(&ball->at, memory_order_acquire) != player)
            ;
        atomic_store_explicit(&ball->at, !player, memory_order_release);
    }
}

static void *second(void *arg)
{
    struct ball *ball = arg;
    stay_on(ball->cores[1]);
    play(ball, 1, WARM_UP + ROUNDS);
    return NULL;
}

static void *first(void *arg)
{
    struct ball *ball = arg;
    stay_on(ball->cores[0]);
    play(ball, 0, WARM_UP);
    const int64_t start = clock_now_ns();
    play(ball, 0, ROUNDS);
    return (void *)(intptr_t)((clock_now_ns() - start) / ROUNDS);
}

// Round trip in nanoseconds between two cores, with threads pinned to them; -1: unavailable.
__attribute__((visibility("default"))) int cores_round_trip_ns(int one, int other)
{
    struct ball ball = {.cores = {one, other}};
    pthread_t threads[2];
    void *ns;
    if (pthread_create(&threads[1], NULL, second, &ball))
        return -1;
    if (pthread_create(&threads[0], NULL, first, &ball)) {
        play(&ball, 0, WARM_UP + ROUNDS);
        pthread_join(threads[1], NULL);
        return -1;
    }
    pthread_join(threads[0], &ns);
    pthread_join(threads[1], NULL);
    return (int)(intptr_t)ns;
}
