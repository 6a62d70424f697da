#include "core/telemetry/timeline.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/status.h"
#include "core/telemetry/log.h"

enum { EVENT_BYTES = 2048, NAME_BYTES = 512 };

static const char CLOSING[] = "\n]\n";

struct track {
    struct table_node by_name;
    struct operation_key key;
    int pid, begun[2];                  // begun: events of each kind that have not ended
    char name[];
};

static bool track_has_key(const struct table_node *node, const void *arg)
{
    return operation_key_equals(&TABLE_CONTAINER(node, struct track, by_name)->key, arg);
}

void timeline_close(struct timeline *t)
{
    if (t->open)
        close(t->fd);
    t->open = false;
    for (struct table_node *node = table_next(&t->tracks, NULL), *next; node; node = next) {
        next = table_next(&t->tracks, node);
        free(TABLE_CONTAINER(node, struct track, by_name));
    }
    table_fini(&t->tracks);
    free(t->path);
    t->path = NULL;
}

// After an event was only partly written: keeps the earlier events a valid list.
static void close_bracket(struct timeline *t)
{
    size_t size = sizeof CLOSING - 1;
    if (t->end && pwrite(t->fd, CLOSING, size, t->end) == (ssize_t)size && ftruncate(t->fd, t->end + (off_t)size) != 0)
        log_put_format(t->log, BHVD_LOG_WARNING, __FILE__, __LINE__, "the timeline %s ends with an incomplete event: %s",
                       t->path, strerror(errno));
}

// Writes the event over the closing bracket, followed by a new bracket, in one call: the file never contains an incomplete event.
static void write_event(struct timeline *t, const char *event)
{
    char text[EVENT_BYTES + 16];
    int size = snprintf(text, sizeof text, "%s%s", t->end ? ",\n" : "[\n", event);
    memcpy(text + size, CLOSING, sizeof CLOSING - 1);
    size_t nbytes = (size_t)size + sizeof CLOSING - 1;
    errno = 0;
    if (pwrite(t->fd, text, nbytes, t->end) != (ssize_t)nbytes) {
        log_put_format(t->log, BHVD_LOG_WARNING, __FILE__, __LINE__, "cannot write the timeline %s, which ends here: %s",
                       t->path, strerror(errno ? errno : ENOSPC));
        close_bracket(t);
        timeline_close(t);
        return;
    }
    t->end += size;
}

__attribute__((format(printf, 2, 3))) static void add_event(struct timeline *t, const char *format, ...)
{
    char event[EVENT_BYTES];
    va_list args;
    if (!t->open)
        return;
    va_start(args, format);
    int size = vsnprintf(event, sizeof event, format, args);
    va_end(args);
    if (size < EVENT_BYTES)
        write_event(t, event);
}

struct timestamp {
    char text[32];
};

/* Microseconds, with a decimal point in any locale. */
static struct timestamp now_us(const struct timeline *t)
{
    const long long ns = (long long)(clock_now_ns() - t->start_ns);
    struct timestamp now;
    snprintf(now.text, sizeof now.text, "%lld.%03lld", ns / 1000, ns % 1000);
    return now;
}

// Size of the UTF-8 character at text; 0: invalid.
static size_t utf8_size(const char *text, size_t left)
{
    const unsigned char first = (unsigned char)text[0];
    const size_t size = first < 0x80   ? 1
                        : first < 0xc2 ? 0
                        : first < 0xe0 ? 2
                        : first < 0xf0 ? 3
                        : first < 0xf5 ? 4
                                       : 0;
    if (size > left)
        return 0;
    for (size_t i = 1; i < size; i++)
        if (((unsigned char)text[i] & 0xc0) != 0x80)
            return 0;
    return size;
}

// A name as the contents of a JSON string, truncated to NAME_BYTES between two characters. '?' replaces invalid UTF-8.
static void escape(char *out, const char *name, size_t size)
{
    size_t at = 0;
    for (size_t i = 0, step; i < size && at + 8 < NAME_BYTES; i += step) {
        const unsigned char c = (unsigned char)name[i];
        const size_t character = utf8_size(name + i, size - i);
        step = character ? character : 1;
        if (c == '"' || c == '\\')
            out[at++] = '\\';
        if (c < 0x20)
            at += (size_t)sprintf(out + at, "\\u%04x", c);
        else if (!character)
            out[at++] = '?';
        else
            at = (size_t)((char *)mempcpy(out + at, name + i, character) - out);
    }
    out[at] = '\0';
}

static struct track *find_track(const struct timeline *t, const struct operation_key *key)
{
    struct table_node *node = table_find(&t->tracks, operation_hash(key), track_has_key, key);
    return node ? TABLE_CONTAINER(node, struct track, by_name) : NULL;
}

// Returns the pid of an event that begins. 0: no memory.
static int begin_track(struct timeline *t, const struct operation_key *key, enum timeline_event event)
{
    struct track *track = find_track(t, key);
    if (track) {
        track->begun[event]++;
        return track->pid;
    }
    track = malloc(sizeof *track + key->name_size);
    if (!track)
        return 0;
    memcpy(track->name, key->name, key->name_size);
    track->key = (struct operation_key){key->process_set, key->name_size, track->name};
    track->pid = ++t->next_pid;
    track->begun[event] = 1;
    track->begun[!event] = 0;
    if (!table_insert(&t->tracks, &track->by_name, operation_hash(key))) {
        free(track);
        return 0;
    }
    int pid = track->pid;
    char name[NAME_BYTES];
    escape(name, key->name, key->name_size);
    add_event(t, "{\"name\":\"process_name\",\"ph\":\"M\",\"pid\":%d,\"args\":{\"name\":\"%s\"}}", pid, name);
    add_event(t, "{\"name\":\"process_sort_index\",\"ph\":\"M\",\"pid\":%d,\"args\":{\"sort_index\":%d}}", pid, pid);
    return pid;
}

// Returns the pid of an event that ends. 0: it began before the file was opened, so its end is left out.
static int end_track(struct timeline *t, const struct operation_key *key, enum timeline_event event)
{
    struct track *track = t->open ? find_track(t, key) : NULL;
    return track && track->begun[event] && track->begun[event]-- ? track->pid : 0;
}

void timeline_begin(struct timeline *t, const struct operation_key *key, enum timeline_event event, const char *kind)
{
    int pid = t->open ? begin_track(t, key, event) : 0;
    if (pid)
        add_event(t, "{\"name\":\"%s%s\",\"ph\":\"B\",\"ts\":%s,\"pid\":%d}",
                  event == TIMELINE_NEGOTIATION ? "NEGOTIATE_" : "", kind, now_us(t).text, pid);
}

void timeline_rank_ready(struct timeline *t, const struct operation_key *key, int rank)
{
    const struct track *track = t->open ? find_track(t, key) : NULL;
    if (track && track->begun[TIMELINE_NEGOTIATION])
        add_event(t, "{\"name\":\"%d\",\"ph\":\"X\",\"ts\":%s,\"dur\":0,\"pid\":%d}", rank, now_us(t).text, track->pid);
}

void timeline_negotiation_end(struct timeline *t, const struct operation_key *key)
{
    int pid = end_track(t, key, TIMELINE_NEGOTIATION);
    if (pid)
        add_event(t, "{\"ph\":\"E\",\"ts\":%s,\"pid\":%d}", now_us(t).text, pid);
}

void timeline_refusal(struct timeline *t, const struct operation_key *key, const char *message)
{
    char text[NAME_BYTES];
    timeline_begin(t, key, TIMELINE_EXECUTION, "ERROR");
    int pid = end_track(t, key, TIMELINE_EXECUTION);
    if (!pid)
        return;
    escape(text, message, strlen(message));
    add_event(t,
              "{\"ph\":\"E\",\"ts\":%s,\"pid\":%d,\"args\":{\"dtype\":\"\",\"shape\":\"\",\"message\":\"%s\"}}",
              now_us(t).text, pid, text);
}

void timeline_operation_end(struct timeline *t, const struct operation_key *key, const struct bytes *request_bytes, bool failed)
{
    int pid = end_track(t, key, TIMELINE_EXECUTION);
    if (!pid)
        return;
    char shape[256] = "";
    const char *dtype = "";
    struct request *request;
    request_parse(request_bytes->data, request_bytes->size, &request);
    if (request && request->args.tensor_count) {
        dtype = bhvd_dtype_name(request->tensors[0].dtype);
        request_format_shape(shape, sizeof shape, &request->tensors[0]);
    }
    request_release(request);
    add_event(t, "{\"ph\":\"E\",\"ts\":%s,\"pid\":%d,\"args\":{\"dtype\":\"%s\",\"shape\":\"%s\"%s}}", now_us(t).text,
              pid, dtype, shape, failed ? ",\"error\":true" : "");
}

void timeline_cycle(struct timeline *t)
{
    if (t->open && t->mark_cycles)
        add_event(t, "{\"name\":\"CYCLE_START\",\"ph\":\"i\",\"ts\":%s,\"pid\":0,\"s\":\"g\"}",
                  now_us(t).text);
}

bhvd_status timeline_open(struct timeline *t, const char *path, bool mark_cycles, struct bhvd_error *error)
{
    struct timespec wall;
    timeline_close(t);
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (fd < 0)
        return error_set(error, BHVD_ERR_ARGUMENT, "the timeline %s cannot be written: %s", path, strerror(errno));
    *t = (struct timeline){.open = true, .mark_cycles = mark_cycles, .fd = fd, .path = strdup(path), .log = t->log,
                           .start_ns = clock_now_ns()};
    clock_gettime(CLOCK_REALTIME, &wall);
    add_event(t, "{\"name\":\"process_name\",\"ph\":\"M\",\"pid\":0,\"args\":{\"start_time_since_epoch_in_micros\":%lld}}",
              (long long)wall.tv_sec * 1000000 + wall.tv_nsec / 1000);
    return BHVD_OK;
}
