// Threads of the core never handle signals of the process: Python's signals, and those that sigwait() waits for, would
// be delivered late or never to a thread that sleeps in poll().
#pragma once

#include <pthread.h>
#include <signal.h>

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
