// Threads of the core never handle signals of the process: Python's signals, and those that sigwait() waits for, would
// be delivered late or never to a thread that sleeps in poll().
#pragma once

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>

// As pthread_create, with all signals blocked except those for faults of the thread itself.
static inline int thread_create(pthread_t *thread, void *(*run)(void *), void *arg)
{
    static const int faults[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGSYS, SIGABRT};
    sigset_t blocked, before;
    sigfillset(&blocked);
    for (size_t i = 0; i < sizeof faults / sizeof *faults; i++)
        sigdelset(&blocked, faults[i]);
    pthread_sigmask(SIG_SETMASK, &blocked, &before);
    int failure = pthread_create(thread, NULL, run, arg);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return failure;
}

// Linux futex, a word of this process: sleeps while *word == expected, at most until deadline_ns (base/clock.h). May return
// early: check the word again.
void futex_wait(_Atomic uint32_t *word, uint32_t expected, int64_t deadline_ns);
void futex_wake_all(_Atomic uint32_t *word);
