// The core's log: records in a queue, which a thread of the process takes (Python's, for its logging).
// Logging never waits. Nothing here calls out of the core, and the lock protects only a list: it is the
// innermost one, so a thread that logs with the engine's lock held waits for no other lock, in particular not for Python's GIL.
#pragma once

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "bagua_hvd.h"
#include "base/containers.h"

struct log_record;

struct log {
    pthread_mutex_t lock;
    struct FIFO(struct log_record) records;
    int kept, dropped;                  // queued; dropped: the queue was full, or there was no memory
    bool closed;
    _Atomic uint32_t changes;           // futex for threads that wait for a record
};

void log_init(struct log *log);
// No thread may be waiting.
void log_fini(struct log *log);
// In a forked child: a fresh lock. Existing records belong to the parent.
void log_after_fork(struct log *log);
// Ends log_next after the remaining records have been taken.
void log_close(struct log *log);

// Implements bhvd_context_next_record.
int log_next(struct log *log, int timeout_ms, struct bhvd_record **out);

// From any thread, with any locks held.
void log_put(struct log *log, bhvd_log_level level, const char *file, int line, const void *text, size_t size);
void log_put_format(struct log *log, bhvd_log_level level, const char *file, int line, const char *format, ...)
    __attribute__((format(printf, 5, 6)));
#define log_write(ctx, level, ...) log_put_format(&(ctx)->log, level, __FILE__, __LINE__, __VA_ARGS__)
