#include "core/telemetry/log.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/thread.h"

enum { RECORDS_MAX = 256, LINE_BYTES = 2048 };

struct log_record {
    struct bhvd_record public;          // must be first: callers get a pointer to it
    struct log_record *next;
    char text[];
};

void log_init(struct log *log) { pthread_mutex_init(&log->lock, NULL); }

void log_fini(struct log *log)
{
    for (struct log_record *record; (record = fifo_take(&log->records, next));)
        free(record);
    pthread_mutex_destroy(&log->lock);
}

void log_after_fork(struct log *log)
{
    log_init(log);
    log->records.head = NULL;
    log->kept = log->dropped = 0;
    log->closed = true;
}

static void wake_readers(struct log *log)
{
    atomic_fetch_add(&log->changes, 1);
    futex_wake_all(&log->changes);
}

void log_close(struct log *log)
{
    pthread_mutex_lock(&log->lock);
    log->closed = true;
    pthread_mutex_unlock(&log->lock);
    wake_readers(log);
}

static struct log_record *record_of(bhvd_log_level level, const char *file, int line, const void *text, size_t size)
{
    struct log_record *record = malloc(sizeof *record + size + 1);
    if (record) {
        *record = (struct log_record){.public = {.level = level, .line = line, .file = file, .text = record->text}};
        memcpy(record->text, text, size);
        record->text[size] = '\0';
    }
    return record;
}

void log_put(struct log *log, bhvd_log_level level, const char *file, int line, const void *text, size_t size)
{
    struct log_record *record = record_of(level, file, line, text, size);
    pthread_mutex_lock(&log->lock);
    bool keep = record && log->kept < RECORDS_MAX;
    if (keep) {
        fifo_put(&log->records, record, next);
        log->kept++;
    } else {
        log->dropped++;
    }
    pthread_mutex_unlock(&log->lock);
    if (!keep)
        free(record);
    wake_readers(log);
}

void log_put_format(struct log *log, bhvd_log_level level, const char *file, int line, const char *format, ...)
{
    char text[LINE_BYTES];
    va_list args;
    va_start(args, format);
    int size = vsnprintf(text, sizeof text, format, args);
    va_end(args);
    log_put(log, level, file, line, text, size < LINE_BYTES ? (size_t)size : LINE_BYTES - 1);
}

// Reports dropped records. Bypasses the queue, which may be full again.
static struct log_record *dropped_record(int dropped)
{
    char text[100];
    int size = snprintf(text, sizeof text, "%d records before this one were dropped: the queue was full", dropped);
    return record_of(BHVD_LOG_WARNING, __FILE__, __LINE__, text, (size_t)size);
}

// The oldest record; NULL: none.
static struct log_record *take(struct log *log, bool *closed)
{
    pthread_mutex_lock(&log->lock);
    struct log_record *record = fifo_take(&log->records, next);
    *closed = log->closed;
    if (record) {
        log->kept--;
    } else if (log->dropped) {
        record = dropped_record(log->dropped);
        log->dropped = record ? 0 : log->dropped;
    }
    pthread_mutex_unlock(&log->lock);
    return record;
}

int log_next(struct log *log, int timeout_ms, struct bhvd_record **out)
{
    int64_t deadline_ns = clock_deadline_ns(timeout_ms);
    for (;;) {
        uint32_t changes = atomic_load(&log->changes);
        bool closed;
        struct log_record *record = take(log, &closed);
        *out = record ? &record->public : NULL;
        if (record)
            return 1;
        if (closed)
            return -1;
        if (clock_now_ns() >= deadline_ns)
            return 0;
        futex_wait(&log->changes, changes, deadline_ns);
    }
}

void bhvd_record_free(struct bhvd_record *record) { free(record); }
