#include "transport/greeter.h"

#include <errno.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

#include "base/clock.h"
#include "transport/socket.h"

enum {
    ACCEPT_BATCH = 64,          // connections at a time; then those who are here have their turn
    ACCEPT_PAUSE_MS = 100       // when out of descriptors
};

_Static_assert((int)GREETER_NAME_MAX >= (int)AUTH_HELLO_SIZE && (int)AUTH_HELLO_SIZE >= (int)AUTH_PROOF_SIZE,
               "a stranger's buffer holds the message of every stage");

enum stage { HELLO, PROOF, NAME };

struct stranger {
    int fd, listener;
    enum stage stage;
    int64_t deadline_ns;
    struct auth auth;
    size_t moved;               // of the stage's message
    unsigned char message[GREETER_NAME_MAX];
};

struct greeter {
    struct greeter_options options;
    int64_t accept_again_ns;
    int64_t lacking_since_ns;   // descriptors or memory; 0: nothing is lacking
    int unserved;               // strangers that were waited for, and have not had their turn
    int count;
    struct stranger strangers[GREETER_STRANGERS_MAX];       // in the order they came
};

struct greeter *greeter_create(const struct greeter_options *options)
{
    struct greeter *greeter = calloc(1, sizeof *greeter);
    if (greeter)
        greeter->options = *options;
    return greeter;
}

static void forget(struct greeter *greeter, int index)
{
    greeter->count--;
    memmove(greeter->strangers + index, greeter->strangers + index + 1,
            (size_t)(greeter->count - index) * sizeof greeter->strangers[0]);
}

static void drop(struct greeter *greeter, int index)
{
    close(greeter->strangers[index].fd);
    forget(greeter, index);
}

void greeter_destroy(struct greeter *greeter)
{
    while (greeter && greeter->count)
        drop(greeter, greeter->count - 1);
    free(greeter);
}

static size_t wanted(const struct greeter *greeter, const struct stranger *s)
{
    return s->stage == HELLO ? AUTH_HELLO_SIZE : s->stage == PROOF ? AUTH_PROOF_SIZE : greeter->options.name_size;
}

// These few bytes are the first that the socket takes: it takes them at once.
static bool say(const struct stranger *s, const uint8_t *data, size_t size)
{
    size_t moved;
    return socket_write(s->fd, data, size, &moved) == BHVD_OK && moved == size;
}

// The stage's message is complete. False: it is no rank of this job.
static bool advance(struct greeter *greeter, struct stranger *s)
{
    const struct greeter_options *options = &greeter->options;
    if (s->stage == HELLO && (auth_begin(&s->auth, AUTH_ACCEPTED, &options->bindings[s->listener], NULL) ||
                              auth_receive_hello(&s->auth, s->message, options->secret, options->secret_size, NULL) ||
                              !say(s, s->auth.hello, sizeof s->auth.hello) ||
                              !say(s, s->auth.proof, sizeof s->auth.proof)))
        return false;
    if (s->stage == PROOF && auth_receive_proof(&s->auth, s->message, NULL))
        return false;
    s->stage++;
    s->moved = 0;
    return true;
}

// BHVD_OK: it has proven the secret and said its name. BHVD_IN_PROGRESS: not yet. Else it is to be dropped.
static bhvd_status read_from(struct greeter *greeter, struct stranger *s)
{
    for (;;) {
        bhvd_status status = socket_read_part(s->fd, s->message, wanted(greeter, s), &s->moved);
        if (status || s->stage == NAME)
            return status;
        if (!advance(greeter, s))
            return BHVD_ERR_AUTH;
    }
}

// Makes room. False: all have proven the secret.
static bool evict_one(struct greeter *greeter)
{
    unsigned random = 0;
    int evictable[GREETER_STRANGERS_MAX], count = 0;
    for (int i = 0; i < greeter->count; i++)
        if (greeter->strangers[i].stage < NAME)
            evictable[count++] = i;
    if (!count)
        return false;
    (void)!getrandom(&random, sizeof random, GRND_NONBLOCK);
    drop(greeter, evictable[random % (unsigned)count]);
    return true;
}

// There is no stranger to evict.
static bhvd_status pause_accepting(struct greeter *greeter)
{
    const int64_t now_ns = clock_now_ns();
    const int failure = errno;
    greeter->accept_again_ns = now_ns + ACCEPT_PAUSE_MS * INT64_C(1000000);
    if (!greeter->lacking_since_ns)
        greeter->lacking_since_ns = now_ns;
    errno = failure;
    return now_ns - greeter->lacking_since_ns >= GREETER_LACKING_MS * INT64_C(1000000) ? BHVD_ERR_SYSTEM : BHVD_OK;
}

static bhvd_status accept_some(struct greeter *greeter, int listener)
{
    const bool is_local = greeter->options.bindings[listener].purpose == AUTH_LOCAL;
    for (int i = 0; i < ACCEPT_BATCH; i++) {
        int fd;
        bhvd_status status = socket_accept(greeter->options.listeners[listener], 0, &fd, NULL);
        if (status == BHVD_ERR_TIMEOUT)
            break;
        if (status && !evict_one(greeter))
            return pause_accepting(greeter);
        if (status)
            continue;
        greeter->lacking_since_ns = 0;
        if ((is_local && !socket_is_of_this_user(fd)) || (greeter->count == GREETER_STRANGERS_MAX && !evict_one(greeter))) {
            close(fd);
            continue;
        }
        greeter->strangers[greeter->count++] = (struct stranger){
            .fd = fd, .listener = listener, .deadline_ns = clock_deadline_ns(GREETER_STRANGER_MS)};
    }
    return BHVD_OK;
}

int greeter_poll(struct greeter *greeter, struct pollfd *polls, int64_t *wake_ns)
{
    const bool accepts = greeter->accept_again_ns <= clock_now_ns();
    const int64_t due_ns = greeter->count ? greeter->strangers[0].deadline_ns : CLOCK_NEVER;
    for (int i = 0; i < GREETER_LISTENERS_MAX; i++)
        polls[i] = (struct pollfd){.fd = accepts ? greeter->options.listeners[i] : -1, .events = POLLIN};
    for (int i = 0; i < greeter->count; i++)
        polls[GREETER_LISTENERS_MAX + i] = (struct pollfd){.fd = greeter->strangers[i].fd, .events = POLLIN};
    greeter->unserved = greeter->count;
    *wake_ns = due_ns < *wake_ns ? due_ns : *wake_ns;
    if (!accepts && greeter->accept_again_ns < *wake_ns)
        *wake_ns = greeter->accept_again_ns;
    return GREETER_LISTENERS_MAX + greeter->count;
}

bhvd_status greeter_next(struct greeter *greeter, struct pollfd *polls, struct greeted *out)
{
    const int64_t now_ns = clock_now_ns();
    // From the last to the first, so that those who go do not move those who are still to come.
    while (greeter->unserved > 0) {
        const int i = --greeter->unserved;
        struct stranger *s = &greeter->strangers[i];
        const bhvd_status status = polls[GREETER_LISTENERS_MAX + i].revents ? read_from(greeter, s) : BHVD_IN_PROGRESS;
        if (!status) {
            *out = (struct greeted){.fd = s->fd, .listener = s->listener, .rank = s->auth.binding.caller};
            memcpy(out->name, s->message, greeter->options.name_size);
            forget(greeter, i);
            return BHVD_OK;
        }
        if (status != BHVD_IN_PROGRESS || s->deadline_ns <= now_ns)
            drop(greeter, i);
    }
    for (int i = 0; i < GREETER_LISTENERS_MAX; i++) {
        bhvd_status status = polls[i].revents ? accept_some(greeter, i) : BHVD_OK;
        polls[i].revents = 0;
        if (status)
            return status;
    }
    return BHVD_ERR_TIMEOUT;
}
