// What the core has to say to people: records in a queue, which a thread of the process takes (Python's, for its logging).
// Who speaks goes on at once. Nothing here calls out of the core, and the lock guards a list and nothing else: it is the
// innermost one, so a thread that speaks with the engine's lock held waits for no other, and for Python's least of all.
#pragma once

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "bagua_hvd.h"
#include "base/fifo.h"

struct log_record;

struct log {
    pthread_mutex_t lock;
    struct FIFO(struct log_record) records;
    int kept, lost;                     // beyond a limit, if nobody takes them
    bool closed;
    _Atomic uint32_t changes;           // who waits for a record sleeps on it
};

void log_init(struct log *log);
// Nobody waits.
void log_fini(struct log *log);
// In a forked child: a fresh lock. What was said is the parent's to tell.
void log_after_fork(struct log *log);
// Ends the waiting, once what was said has been taken.
void log_close(struct log *log);

// bhvd_context_next_record.
int log_next(struct log *log, int timeout_ms, struct bhvd_record **out);

// Any thread, any lock held.
void log_put(struct log *log, bhvd_log_level level, const char *file, int line, const void *text, size_t size);
void log_put_format(struct log *log, bhvd_log_level level, const char *file, int line, const char *format, ...)
    __attribute__((format(printf, 5, 6)));
#define log_say(ctx, level, ...) log_put_format(&(ctx)->log, level, __FILE__, __LINE__, __VA_ARGS__)
