#include "transport/door.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/status.h"
#include "base/thread.h"
#include "transport/auth.h"
#include "transport/greeter.h"
#include "transport/socket.h"

enum {
    HELLO_MAGIC = 0x34484742,           // "BGH4"
    ANSWER_MS = 5000,                   // for a byte into an empty socket
    RETRY_MS = 50,
    REFUSED_MS = 1000,                  // whose news comes by another way within that: how did it end?
    SYSTEM_MS = 5000,                   // this process lacks descriptors or memory, perhaps for a moment
    FAR_NS = 2000000,                   // a round trip to another site
    FAR_STREAMS = 4
};
// CHANNEL_STREAM + i is stream i.
enum channel_kind { CHANNEL_CONTROL = 0, CHANNEL_LOCAL = 1, CHANNEL_STREAM = 2 };

// The first bytes on an authenticated connection.
struct hello {
    uint32_t magic;
    int32_t rank;
    uint32_t channel;
    uint32_t streams;                   // to this rank; on its control channel, which comes first
};

// What has come in from a rank.
struct known {
    uint16_t channels;                  // as bits
    uint8_t streams;
};

struct door {
    struct door_options options;
    _Atomic int references;             // the owner's, and each thread's
    _Atomic bool closed;
    _Atomic int count;                  // of arrivals
    pthread_mutex_t lock;               // of the list
    struct arrival *head, **tail;
    struct address *addresses;
    struct known *known;                // the accepting thread's
    unsigned char *secret;
    pthread_t thread;
    bool accepts;
    int stop_fd;                        // an eventfd that ends it
};

static void close_fd(int *fd)
{
    if (*fd >= 0)
        close(*fd);
    *fd = -1;
}

static void arrival_init(struct arrival *arrival, int rank)
{
    *arrival = (struct arrival){.rank = rank, .control = -1};
    for (int i = 0; i < LINK_STREAMS_MAX; i++)
        arrival->streams[i] = -1;
}

void arrival_close(struct arrival *arrival)
{
    close_fd(&arrival->control);
    for (int i = 0; i < LINK_STREAMS_MAX; i++)
        close_fd(&arrival->streams[i]);
}

static void door_free(struct door *door)
{
    for (struct arrival *arrival; (arrival = door_take(door));) {
        arrival_close(arrival);
        free(arrival);
    }
    close_fd(&door->options.tcp_listener);
    close_fd(&door->options.local_listener);
    close_fd(&door->options.bell_fd);
    close_fd(&door->stop_fd);
    if (door->secret)
        explicit_bzero(door->secret, door->options.secret_size);
    free(door->secret);
    free(door->addresses);
    free(door->known);
    pthread_mutex_destroy(&door->lock);
    free(door);
}

static void door_drop(struct door *door)
{
    if (atomic_fetch_sub(&door->references, 1) == 1)
        door_free(door);
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
static bool is_expected(const struct door *door, const struct hello *hello, bool local)
{
    const int asked = hello->rank >= 0 && hello->rank < door->options.size ? door->addresses[hello->rank].streams : 0;
    if (hello->magic != HELLO_MAGIC || hello->rank <= door->options.rank || hello->rank >= door->options.size ||
        (hello->channel == CHANNEL_LOCAL) != local || hello->channel >= CHANNEL_STREAM + LINK_STREAMS_MAX)
        return false;
    const struct known *known = &door->known[hello->rank];
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

static bool let_in(struct door *door, const struct hello *hello, int fd, bool local)
{
    if (!is_expected(door, hello, local) || (!local && !say_welcome(fd)))
        return false;
    struct arrival *arrival = malloc(sizeof *arrival);
    if (!arrival)
        return false;
    struct known *known = &door->known[hello->rank];
    known->channels |= (uint16_t)(1u << hello->channel);
    arrival_init(arrival, hello->rank);
    arrival->is_local = local;
    if (hello->channel >= CHANNEL_STREAM) {
        arrival->streams[hello->channel - CHANNEL_STREAM] = fd;
    } else {
        arrival->control = fd;
        arrival->stream_count = door->options.by_mpi || local ? 1 : (int)hello->streams;
        arrival->round_trip_ns = local ? 0 : socket_round_trip_ns(fd);
        known->streams = local || door->options.by_mpi ? 0 : (uint8_t)hello->streams;
    }
    put(door, arrival);
    return true;
}

// Said once: the job ends by it.
static void complain(struct door *door, bool *said)
{
    struct arrival *arrival = *said ? NULL : malloc(sizeof *arrival);
    if (arrival) {
        arrival_init(arrival, -1);
        error_set(&arrival->error, BHVD_ERR_SYSTEM, "the connections of the other ranks cannot be accepted: %s%s", strerror(errno),
                  socket_remedy(errno));
        put(door, arrival);
    }
    *said = true;
}

static void *accept_main(void *arg)
{
    struct door *door = arg;
    const struct greeter_options options = {{door->options.tcp_listener, door->options.local_listener}, door->secret,
                                            door->options.secret_size, sizeof(struct hello)};
    struct greeter *greeter = greeter_create(&options);
    struct pollfd polls[1 + GREETER_POLLS_MAX] = {{.fd = door->stop_fd, .events = POLLIN}};
    bool said = false;
    while (greeter && !atomic_load(&door->closed)) {
        struct hello hello;
        int fd, listener;
        int64_t wake_ns = CLOCK_NEVER;
        const int count = greeter_poll(greeter, polls + 1, &wake_ns);
        socket_poll(polls, 1 + (size_t)count, wake_ns);
        bhvd_status status;
        while (!(status = greeter_next(greeter, polls + 1, &hello, &fd, &listener))) {
            if (!let_in(door, &hello, fd, listener == 1))
                close(fd);
        }
        if (status == BHVD_ERR_SYSTEM)
            complain(door, &said);
    }
    greeter_destroy(greeter);
    return NULL;
}

// --------------------------------------------------------------------------------------------------------------- going out

// What the kernel lets one connection have under way (4 MB mostly) fills a link of a Gbit/s up to 30 ms; and what is lost costs one of
// several connections less of its speed.
static int streams_for(int64_t round_trip_ns) { return round_trip_ns >= FAR_NS ? FAR_STREAMS : 1; }

struct call {
    struct door *door;
    int rank;
    bool at_start;                      // who refuses then has ended, and nobody else will tell
    bool control_is_missing;
    int stream_count;                   // as agreed, when control is there
    int64_t connect_deadline_ns, deadline_ns;
};

// The rank is not there any more: nobody is, or another program that has its port now.
static bool is_somebody_else(bhvd_status status, int failure)
{
    return status == BHVD_ERR_AUTH || failure == ECONNREFUSED || failure == ECONNRESET;
}

// How long what goes wrong may go on so.
static int patience_ms(const struct call *call, bhvd_status status, int failure)
{
    if (status == BHVD_ERR_PEER_LOST)
        return -1;                      // no route, or hung up upon, as strangers are: as long as there is time
    if (status == BHVD_ERR_TIMEOUT || call->at_start)
        return 0;
    return is_somebody_else(status, failure) ? REFUSED_MS : SYSTEM_MS;
}

// streams: as agreed; of a control channel, to be agreed by what this finds when it is 0.
static bhvd_status greet(const struct call *call, uint32_t channel, int *streams, int fd, struct bhvd_error *error)
{
    const struct door *door = call->door;
    bhvd_status status = auth_handshake(fd, AUTH_CONNECTED, door->secret, door->options.secret_size, call->deadline_ns, error);
    if (status)
        return status;
    if (!*streams)
        *streams = door->options.by_mpi ? 1 : streams_for(socket_round_trip_ns(fd));
    const struct hello hello = {HELLO_MAGIC, door->options.rank, channel, (uint32_t)*streams};
    unsigned char answer;
    status = socket_write_full(fd, &hello, sizeof hello, call->deadline_ns);
    if (!status)
        status = socket_read_full(fd, &answer, sizeof answer, call->deadline_ns);
    return status ? error_set(error, status, "it broke while it was made") : BHVD_OK;
}

static bhvd_status connect_channel(const struct call *call, uint32_t channel, int *streams, int *out, struct bhvd_error *error)
{
    const struct address *address = &call->door->addresses[call->rank];
    for (int64_t failing_ns = 0;;) {
        int fd = -1;
        errno = 0;
        // On a control channel the line may be measured (probe.h).
        const char *congestion = channel == CHANNEL_CONTROL ? SOCKET_UNSPACED : NULL;
        bhvd_status status = socket_connect_by(address->host, address->port, congestion, call->connect_deadline_ns, &fd, error);
        const int failure = status ? errno : 0;
        if (!status) {
            status = greet(call, channel, streams, fd, error);
            if (!status) {
                *out = fd;
                return BHVD_OK;
            }
            close(fd);
        }
        const int patience = patience_ms(call, status, failure);
        const int64_t now_ns = clock_now_ns();
        failing_ns = failing_ns ? failing_ns : now_ns;
        const int64_t end_ns = failure ? call->connect_deadline_ns : call->deadline_ns;
        if (atomic_load(&call->door->closed) || now_ns >= end_ns ||
            (patience >= 0 && now_ns >= failing_ns + (int64_t)patience * 1000000))
            return is_somebody_else(status, failure) && !call->at_start ? BHVD_ERR_PEER_LOST : status;
        poll(NULL, 0, RETRY_MS);
    }
}

static bhvd_status connect_control(const struct call *call, struct arrival *out, struct bhvd_error *error)
{
    out->stream_count = call->door->addresses[call->rank].streams;
    bhvd_status status = connect_channel(call, CHANNEL_CONTROL, &out->stream_count, &out->control, error);
    out->round_trip_ns = status ? 0 : socket_round_trip_ns(out->control);
    return status;
}

bhvd_status door_call(struct door *door, int rank, int64_t deadline_ns, struct arrival *out, struct bhvd_error *error)
{
    const struct call call = {.door = door, .rank = rank, .at_start = true, .connect_deadline_ns = deadline_ns,
                              .deadline_ns = deadline_ns};
    arrival_init(out, rank);
    bhvd_status status = connect_control(&call, out, error);
    if (!status)
        return BHVD_OK;
    const struct bhvd_error why = *error;
    return error_set(error, status, "no connection from rank %d to rank %d: %.900s", door->options.rank, rank, why.message);
}

bhvd_status door_greet_local(struct door *door, int fd, int64_t deadline_ns, struct bhvd_error *error)
{
    const struct hello hello = {HELLO_MAGIC, door->options.rank, CHANNEL_LOCAL, 1};
    bhvd_status status = auth_handshake(fd, AUTH_CONNECTED, door->secret, door->options.secret_size, deadline_ns, error);
    return status ? status : socket_write_full(fd, &hello, sizeof hello, deadline_ns);
}

static void *open_main(void *arg)
{
    struct call *call = arg;
    struct door *door = call->door;
    struct arrival *arrival = malloc(sizeof *arrival);
    if (arrival) {
        struct bhvd_error error = {0};
        arrival_init(arrival, call->rank);
        arrival->stream_count = call->stream_count;
        bhvd_status status = call->control_is_missing ? connect_control(call, arrival, &error) : BHVD_OK;
        for (int i = 0; i < arrival->stream_count && !status; i++)
            status = connect_channel(call, CHANNEL_STREAM + (uint32_t)i, &arrival->stream_count, &arrival->streams[i], &error);
        if (status) {
            arrival_close(arrival);
            error_set(&arrival->error, status, "no connection from rank %d to rank %d: %.900s", door->options.rank, call->rank,
                      error.message);
        }
        put(door, arrival);
    }
    free(call);
    door_drop(door);
    return NULL;
}

bhvd_status door_open(struct door *door, int rank, bool control_is_missing, int stream_count)
{
    struct call *call = malloc(sizeof *call);
    pthread_t thread;
    if (!call)
        return BHVD_ERR_SYSTEM;
    *call = (struct call){
        .door = door, .rank = rank, .control_is_missing = control_is_missing, .stream_count = stream_count,
        .connect_deadline_ns = clock_deadline_ns(door->options.connect_ms), .deadline_ns = clock_deadline_ns(door->options.open_ms)};
    atomic_fetch_add(&door->references, 1);
    if (thread_create(&thread, open_main, call)) {
        atomic_fetch_sub(&door->references, 1);
        free(call);
        return BHVD_ERR_SYSTEM;
    }
    pthread_detach(thread);
    return BHVD_OK;
}

// ------------------------------------------------------------------------------------------------------------------ the door

bhvd_status door_create(const struct door_options *options, struct door **out, struct bhvd_error *error)
{
    const size_t size = (size_t)options->size;
    struct door *door = calloc(1, sizeof *door);
    *out = NULL;
    if (!door)
        return error_set(error, BHVD_ERR_SYSTEM, "no memory for %d ranks", options->size);
    door->options = *options;
    door->options.bell_fd = fcntl(options->bell_fd, F_DUPFD_CLOEXEC, 0);
    door->stop_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    door->options.addresses = NULL;
    door->options.secret = NULL;
    door->tail = &door->head;
    atomic_init(&door->references, 1);
    pthread_mutex_init(&door->lock, NULL);
    door->addresses = malloc(size * sizeof *door->addresses);
    door->known = calloc(size, sizeof *door->known);
    door->secret = malloc(options->secret_size + 1);
    if (door->addresses && door->known && door->secret && door->options.bell_fd >= 0 && door->stop_fd > 0) {
        memcpy(door->addresses, options->addresses, size * sizeof *door->addresses);
        memcpy(door->secret, options->secret, options->secret_size);
        door->accepts = thread_create(&door->thread, accept_main, door) == 0;
    }
    if (!door->accepts) {
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
    eventfd_write(door->stop_fd, 1);
    pthread_join(door->thread, NULL);
    close_fd(&door->options.tcp_listener);
    close_fd(&door->options.local_listener);
    close_fd(&door->stop_fd);
}

void door_destroy(struct door *door)
{
    door_close(door);
    if (door)
        door_drop(door);
}

void door_after_fork(struct door *door)
{
    if (!door)
        return;
    close_fd(&door->options.tcp_listener);
    close_fd(&door->options.local_listener);
    close_fd(&door->options.bell_fd);
    close_fd(&door->stop_fd);
}
