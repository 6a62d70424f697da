#include "transport/door.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/status.h"
#include "base/thread.h"
#include "transport/greeter.h"
#include "transport/socket.h"

enum { ANSWER_MS = 5000 };              // for a byte into an empty socket

// What has come in from a rank.
struct known {
    uint16_t channels;                  // as bits
    uint8_t streams;
};

struct door {
    struct door_options options;
    _Atomic bool closed;
    _Atomic int count;                  // of arrivals
    pthread_mutex_t lock;               // of the two lists
    struct arrival *head, **tail;
    struct call *calls, **calls_tail;   // not yet the connector's
    struct address *addresses;
    struct known *known;                // the thread's
    unsigned char *secret;
    pthread_t thread;
    bool runs;
    int wake_fd;                        // an eventfd that tells the thread of calls, and that it is to end
};

static void close_fd(int *fd)
{
    if (*fd >= 0)
        close(*fd);
    *fd = -1;
}

static void put(struct door *door, struct arrival *arrival)
{
    pthread_mutex_lock(&door->lock);
    arrival->next = NULL;
    *door->tail = arrival;
    door->tail = &arrival->next;
    atomic_fetch_add(&door->count, 1);
    pthread_mutex_unlock(&door->lock);
    eventfd_write(door->options.bell_fd, 1);
}

bool door_has_arrivals(const struct door *door) { return atomic_load_explicit(&door->count, memory_order_relaxed); }

struct arrival *door_take(struct door *door)
{
    pthread_mutex_lock(&door->lock);
    struct arrival *arrival = door->head;
    if (arrival) {
        door->head = arrival->next;
        if (!door->head)
            door->tail = &door->head;
        atomic_fetch_sub(&door->count, 1);
    }
    pthread_mutex_unlock(&door->lock);
    return arrival;
}

// ---------------------------------------------------------------------------------------------------------------- coming in

// Does the name make sense, of a rank that knows the secret?
static bool is_expected(const struct door *door, int rank, const struct hello *hello, bool local)
{
    const int asked = rank >= 0 && rank < door->options.size ? door->addresses[rank].streams : 0;
    if (hello->magic != HELLO_MAGIC || rank <= door->options.rank || rank >= door->options.size ||
        (hello->channel == CHANNEL_LOCAL) != local || hello->channel >= CHANNEL_STREAM + LINK_STREAMS_MAX)
        return false;
    const struct known *known = &door->known[rank];
    if (!local && known->channels & 1u << hello->channel)
        return false;
    if (hello->channel == CHANNEL_CONTROL && !door->options.by_mpi)
        return hello->streams >= 1 && hello->streams <= LINK_STREAMS_MAX && (!asked || hello->streams == (uint32_t)asked);
    return hello->channel < CHANNEL_STREAM || hello->channel - CHANNEL_STREAM < known->streams;
}

// Whoever hears nothing comes again.
static bool say_welcome(int fd)
{
    const unsigned char answer = 1;
    return socket_write_full(fd, &answer, sizeof answer, clock_deadline_ns(ANSWER_MS)) == BHVD_OK;
}

static bool let_in(struct door *door, const struct greeted *greeted)
{
    struct hello hello;
    const bool local = greeted->listener == 1;
    memcpy(&hello, greeted->name, sizeof hello);
    if (!is_expected(door, greeted->rank, &hello, local) || (!local && !say_welcome(greeted->fd)))
        return false;
    struct arrival *arrival = arrival_create(greeted->rank);
    if (!arrival)
        return false;
    struct known *known = &door->known[greeted->rank];
    known->channels |= (uint16_t)(1u << hello.channel);
    arrival->is_local = local;
    if (hello.channel >= CHANNEL_STREAM) {
        arrival->streams[hello.channel - CHANNEL_STREAM] = greeted->fd;
    } else {
        arrival->control = greeted->fd;
        arrival->stream_count = door->options.by_mpi || local ? 1 : (int)hello.streams;
        arrival->round_trip_ns = local ? 0 : socket_round_trip_ns(greeted->fd);
        known->streams = local || door->options.by_mpi ? 0 : (uint8_t)hello.streams;
    }
    put(door, arrival);
    return true;
}

// Said once: the job ends by it.
static void complain(struct door *door, bool *said)
{
    const int failure = errno;
    struct arrival *arrival = *said ? NULL : arrival_create(-1);
    if (arrival) {
        error_set(&arrival->error, BHVD_ERR_SYSTEM, "the connections of the other ranks cannot be accepted: %s%s", strerror(failure),
                  socket_remedy(failure));
        put(door, arrival);
    }
    *said = true;
}

static void accept_ready(struct door *door, struct greeter *greeter, struct pollfd *polls, bool *said)
{
    struct greeted greeted;
    bhvd_status status;
    while (!(status = greeter_next(greeter, polls, &greeted))) {
        if (!let_in(door, &greeted))
            close(greeted.fd);
    }
    if (status == BHVD_ERR_SYSTEM)
        complain(door, said);
}

// --------------------------------------------------------------------------------------------------------------- going out

static bhvd_status post(struct door *door, const struct call *what)
{
    struct call *call = malloc(sizeof *call);
    if (!call)
        return BHVD_ERR_SYSTEM;
    *call = *what;
    call->next = NULL;
    pthread_mutex_lock(&door->lock);
    *door->calls_tail = call;
    door->calls_tail = &call->next;
    pthread_mutex_unlock(&door->lock);
    eventfd_write(door->wake_fd, 1);
    return BHVD_OK;
}

bhvd_status door_open_control(struct door *door, int rank, int64_t deadline_ns)
{
    return post(door, &(struct call){.rank = rank, .is_at_start = true, .control_is_missing = true,
                                     .connect_deadline_ns = deadline_ns, .deadline_ns = deadline_ns});
}

bhvd_status door_open(struct door *door, int rank, bool control_is_missing, int stream_count)
{
    return post(door, &(struct call){.rank = rank, .control_is_missing = control_is_missing, .stream_count = stream_count,
                                     .connect_deadline_ns = clock_deadline_ns(door->options.connect_ms),
                                     .deadline_ns = clock_deadline_ns(door->options.open_ms)});
}

bhvd_status door_greet_local(struct door *door, int rank, int fd, int64_t deadline_ns, struct bhvd_error *error)
{
    const struct hello hello = {HELLO_MAGIC, CHANNEL_LOCAL, 1};
    const struct auth_binding binding = {AUTH_LOCAL, door->options.rank, rank, 0};
    bhvd_status status = auth_handshake(fd, AUTH_CONNECTED, &binding, door->secret, door->options.secret_size, deadline_ns, error);
    return status ? status : socket_write_full(fd, &hello, sizeof hello, deadline_ns);
}

static void take_calls(struct door *door, struct connector *connector)
{
    pthread_mutex_lock(&door->lock);
    struct call *calls = door->calls;
    door->calls = NULL;
    door->calls_tail = &door->calls;
    pthread_mutex_unlock(&door->lock);
    for (struct call *next; calls; calls = next) {
        next = calls->next;
        connector_add(connector, calls);
    }
}

// ------------------------------------------------------------------------------------------------------------------ the door

static void serve(struct door *door, struct greeter *greeter, struct connector *connector)
{
    struct pollfd polls[1 + GREETER_POLLS_MAX + CONNECTOR_POLLS_MAX] = {{.fd = door->wake_fd, .events = POLLIN}};
    bool said = false;
    while (!atomic_load(&door->closed)) {
        int64_t wake_ns = CLOCK_NEVER;
        take_calls(door, connector);
        const int greeters = greeter_poll(greeter, polls + 1, &wake_ns);
        struct pollfd *others = polls + 1 + greeters;
        const int connectors = connector_poll(connector, others, &wake_ns);
        socket_poll(polls, 1 + (size_t)(greeters + connectors), wake_ns);
        if (polls[0].revents)
            eventfd_read(door->wake_fd, &(eventfd_t){0});
        for (struct arrival *arrival; (arrival = connector_next(connector, others));)
            put(door, arrival);
        accept_ready(door, greeter, polls + 1, &said);
    }
}

static void *door_main(void *arg)
{
    struct door *door = arg;
    const struct door_options *o = &door->options;
    const struct greeter_options of_greeter = {
        .listeners = {o->tcp_listener, o->local_listener},
        .bindings = {{AUTH_CHANNEL, AUTH_NO_RANK, o->rank, o->tcp_port}, {AUTH_LOCAL, AUTH_NO_RANK, o->rank, 0}},
        .secret = door->secret, .secret_size = o->secret_size, .name_size = sizeof(struct hello)};
    const struct connector_options of_connector = {.rank = o->rank, .by_mpi = o->by_mpi, .addresses = door->addresses,
                                                   .secret = door->secret, .secret_size = o->secret_size};
    struct greeter *greeter = greeter_create(&of_greeter);
    struct connector *connector = connector_create(&of_connector);
    if (greeter && connector)
        serve(door, greeter, connector);
    connector_destroy(connector);
    greeter_destroy(greeter);
    return NULL;
}

static void door_free(struct door *door)
{
    for (struct arrival *arrival; (arrival = door_take(door));)
        arrival_destroy(arrival);
    for (struct call *call = door->calls, *next; call; call = next) {
        next = call->next;
        free(call);
    }
    door_after_fork(door);
    if (door->secret)
        explicit_bzero(door->secret, door->options.secret_size);
    free(door->secret);
    free(door->addresses);
    free(door->known);
    pthread_mutex_destroy(&door->lock);
    free(door);
}

bhvd_status door_create(const struct door_options *options, struct door **out, struct bhvd_error *error)
{
    const size_t size = (size_t)options->size;
    struct door *door = calloc(1, sizeof *door);
    *out = NULL;
    if (!door)
        return error_set(error, BHVD_ERR_SYSTEM, "no memory for %d ranks", options->size);
    door->options = *options;
    door->options.bell_fd = fcntl(options->bell_fd, F_DUPFD_CLOEXEC, 0);
    door->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    door->options.addresses = NULL;
    door->options.secret = NULL;
    door->tail = &door->head;
    door->calls_tail = &door->calls;
    pthread_mutex_init(&door->lock, NULL);
    door->addresses = malloc(size * sizeof *door->addresses);
    door->known = calloc(size, sizeof *door->known);
    door->secret = malloc(options->secret_size + 1);
    if (door->addresses && door->known && door->secret && door->options.bell_fd >= 0 && door->wake_fd >= 0) {
        memcpy(door->addresses, options->addresses, size * sizeof *door->addresses);
        memcpy(door->secret, options->secret, options->secret_size);
        door->runs = thread_create(&door->thread, door_main, door) == 0;
    }
    if (!door->runs) {
        door_free(door);
        return error_set(error, BHVD_ERR_SYSTEM, "no memory, or no descriptor, to let %d ranks in", options->size);
    }
    *out = door;
    return BHVD_OK;
}

void door_close(struct door *door)
{
    if (!door || atomic_exchange(&door->closed, true))
        return;
    eventfd_write(door->wake_fd, 1);
    pthread_join(door->thread, NULL);
    close_fd(&door->options.tcp_listener);
    close_fd(&door->options.local_listener);
}

void door_destroy(struct door *door)
{
    door_close(door);
    if (door)
        door_free(door);
}

void door_after_fork(struct door *door)
{
    if (!door)
        return;
    close_fd(&door->options.tcp_listener);
    close_fd(&door->options.local_listener);
    close_fd(&door->options.bell_fd);
    close_fd(&door->wake_fd);
}
