// The core's log queue: only records beyond its bound are lost, and counted; each thread's records stay in order; waiting
// readers are woken.
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <unistd.h>

#include "check.h"
#include "core/context/context.h"
#include "core/telemetry/log.h"

enum { WRITERS = 4, RECORDS = 5000, BOUND = 256, LIMIT_MS = 60000 };

static bhvd_context *context;           // only its log is used
static _Atomic int put, taken, writing;

static void begin(void)
{
    context = calloc(1, sizeof *context);
    CHECK(context);
    log_init(&context->log);
    put = taken = writing = 0;
}

static void end(void)
{
    log_fini(&context->log);
    free(context);
}

// The next record's text; NULL: none within this time.
static const char *next(int timeout_ms)
{
    static char text[200];
    struct bhvd_record *record;
    if (bhvd_context_next_record(context, timeout_ms, &record) != 1)
        return NULL;
    snprintf(text, sizeof text, "%s", record->text);
    bhvd_record_free(record);
    atomic_fetch_add(&taken, 1);
    return text;
}

static int lost_of(const char *text)
{
    return strstr(text, " records before this one were dropped") ? atoi(text) : 0;
}

TEST(what_is_beyond_the_bound_is_counted)
{
    begin();
    for (int round = 0; round < 2; round++) {
        for (int i = 0; i < BOUND + 44; i++)
            log_write(context, BHVD_LOG_INFO, "record %d", i);
        for (int i = 0; i < BOUND; i++) {
            char expected[32];
            snprintf(expected, sizeof expected, "record %d", i);
            CHECK_STR_EQ(next(0), expected);
        }
        CHECK_EQ(lost_of(next(0)), 44);
        CHECK(!next(0));
    }
    end();
}

static void *fill(void *arg)
{
    for (int i = 0; i < BOUND; i++)
        log_write(context, BHVD_LOG_INFO, "record %d", i);
    atomic_fetch_sub(&writing, 1);
    return arg;
}

// The record with the number of lost records is never lost itself, whatever is added in the meantime.
TEST(the_count_is_never_lost)
{
    for (int round = 0; round < 200; round++) {
        begin();
        writing = WRITERS;
        pthread_t writers[WRITERS];
        for (int t = 0; t < WRITERS; t++)
            pthread_create(&writers[t], NULL, fill, NULL);
        int records = 0, lost = 0;
        for (;;) {
            bool over = writing == 0;
            const char *text = next(0);
            if (text && lost_of(text))
                lost += lost_of(text);
            else if (text)
                records++;
            else if (over)
                break;
        }
        for (int t = 0; t < WRITERS; t++)
            pthread_join(writers[t], NULL);
        CHECK_EQ(records + lost, WRITERS * BOUND);
        end();
    }
}

struct writer {
    int number;
    bool patient;               // continues only when there is room
};

static void *write_records(void *arg)
{
    const struct writer *w = arg;
    for (int i = 0; i < RECORDS; i++) {
        while (w->patient && atomic_load(&put) - atomic_load(&taken) > BOUND - 2 * WRITERS)
            sched_yield();
        atomic_fetch_add(&put, 1);
        log_write(context, BHVD_LOG_INFO, "%d %d", w->number, i);
    }
    if (atomic_fetch_sub(&writing, 1) == 1)
        log_close(&context->log);
    return NULL;
}

static void several_write(bool patient)
{
    begin();
    writing = WRITERS;
    struct writer writers[WRITERS];
    pthread_t threads[WRITERS];
    for (int t = 0; t < WRITERS; t++) {
        writers[t] = (struct writer){t, patient};
        pthread_create(&threads[t], NULL, write_records, &writers[t]);
    }
    int records = 0, lost = 0, last[WRITERS] = {-1, -1, -1, -1};
    for (const char *text; (text = next(LIMIT_MS));) {
        int number, i;
        if (lost_of(text)) {
            lost += lost_of(text);
            continue;
        }
        CHECK(sscanf(text, "%d %d", &number, &i) == 2 && number < WRITERS && i > last[number]);
        CHECK(!patient || i == last[number] + 1);
        last[number] = i;
        records++;
    }
    for (int t = 0; t < WRITERS; t++)
        pthread_join(threads[t], NULL);
    CHECK_EQ(records + lost, WRITERS * RECORDS);
    CHECK(!patient || lost == 0);
    end();
}

TEST(each_threads_records_come_in_its_order_and_none_is_lost_within_the_bound) { several_write(true); }

TEST(each_threads_records_come_in_its_order_and_the_lost_ones_are_counted) { several_write(false); }

static void *speak_then_close(void *arg)
{
    usleep(20000);              // most of the time the reader sleeps
    log_write(context, BHVD_LOG_ERROR, "at last");
    usleep(20000);
    log_close(&context->log);
    return arg;
}

TEST(who_waits_is_woken_by_a_record_and_by_the_end)
{
    struct bhvd_record *record;
    pthread_t speaker;
    begin();
    pthread_create(&speaker, NULL, speak_then_close, NULL);
    CHECK_STR_EQ(next(LIMIT_MS), "at last");
    CHECK_EQ(bhvd_context_next_record(context, LIMIT_MS, &record), -1);
    pthread_join(speaker, NULL);
    end();
}
