#include "transport/listener.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/status.h"
#include "base/thread.h"

// ---------------------------------------------------------------------------------------------------- handshake server

// Accepts connections and reads an introduction (auth.h) from each. Peers that have not sent theirs (strangers) are served
// concurrently: a slow, silent or hostile one delays nobody and is dropped after HANDSHAKE_STRANGER_MS, and their number is
// bounded. A new one evicts a random stranger, so a flood cannot keep out a rank, which retries (connector.h). The server sends
// nothing. It never blocks: the owner polls for it (handshake_server_poll). One thread.
enum {
    HANDSHAKE_STRANGERS_MAX = 256, HANDSHAKE_STRANGER_MS = 5000, HANDSHAKE_LACKING_MS = 3000,
    HANDSHAKE_TCP = 0, HANDSHAKE_LOCAL = 1, HANDSHAKE_LISTENERS = 2,    // HANDSHAKE_LOCAL: a UNIX socket, for this user only
    HANDSHAKE_POLLS_MAX = HANDSHAKE_LISTENERS + HANDSHAKE_STRANGERS_MAX,
    ACCEPT_BATCH = 64,          // connections accepted at a time, before existing ones are served
    ACCEPT_PAUSE_MS = 100       // when out of descriptors
};

struct stranger {
    int fd, listener;           // HANDSHAKE_TCP or HANDSHAKE_LOCAL
    int64_t deadline_ns;
    size_t moved;               // bytes of the introduction
    struct introduction introduction;
};

struct handshake_server {
    int listeners[HANDSHAKE_LISTENERS];     // non-blocking; -1: none
    int64_t accept_again_ns;
    int64_t lacking_since_ns;   // since when descriptors or memory are lacking; 0: they are not
    int unserved;               // strangers that were polled and not yet handled
    int count;
    struct stranger strangers[HANDSHAKE_STRANGERS_MAX];     // in order of arrival
};

static void forget(struct handshake_server *handshakes, int index)
{
    handshakes->count--;
    memmove(handshakes->strangers + index, handshakes->strangers + index + 1,
            (size_t)(handshakes->count - index) * sizeof handshakes->strangers[0]);
}

static void drop(struct handshake_server *handshakes, int index)
{
    const int fd = handshakes->strangers[index].fd;
    forget(handshakes, index);
    close(fd);
}

// Closes connections that have not been handed out.
static void handshake_server_close(struct handshake_server *handshakes)
{
    while (handshakes->count)
        drop(handshakes, handshakes->count - 1);
}

// Drops a random stranger. False: there is none.
static bool evict_one(struct handshake_server *handshakes)
{
    unsigned random = 0;
    if (!handshakes->count)
        return false;
    (void)!getrandom(&random, sizeof random, GRND_NONBLOCK);
    drop(handshakes, (int)(random % (unsigned)handshakes->count));
    return true;
}

// Out of descriptors or memory, with no stranger to evict.
static bhvd_status pause_accepting(struct handshake_server *handshakes)
{
    const int64_t now_ns = clock_now_ns();
    const int failure = errno;
    handshakes->accept_again_ns = now_ns + clock_ms_ns(ACCEPT_PAUSE_MS);
    if (!handshakes->lacking_since_ns)
        handshakes->lacking_since_ns = now_ns;
    errno = failure;
    return now_ns - handshakes->lacking_since_ns >= clock_ms_ns(HANDSHAKE_LACKING_MS) ? BHVD_ERR_SYSTEM : BHVD_OK;
}

static bhvd_status accept_some(struct handshake_server *handshakes, int listener)
{
    for (int i = 0; i < ACCEPT_BATCH; i++) {
        int fd;
        bhvd_status status = socket_accept(handshakes->listeners[listener], &fd);
        if (status == BHVD_ERR_TIMEOUT)
            break;
        if (status && !evict_one(handshakes))
            return pause_accepting(handshakes);
        if (status)
            continue;
        handshakes->lacking_since_ns = 0;
        if (listener == HANDSHAKE_LOCAL && !socket_is_of_this_user(fd)) {
            close(fd);
            continue;
        }
        if (handshakes->count == HANDSHAKE_STRANGERS_MAX)
            evict_one(handshakes);
        handshakes->strangers[handshakes->count++] =
            (struct stranger){.fd = fd, .listener = listener, .deadline_ns = clock_deadline_ns(HANDSHAKE_STRANGER_MS)};
    }
    return BHVD_OK;
}

// Fills in the descriptors to poll, at most HANDSHAKE_POLLS_MAX, returns how many, and lowers *wake_ns to the server's next
// timeout.
static int handshake_server_poll(struct handshake_server *handshakes, struct pollfd *polls, int64_t *wake_ns)
{
    const bool accepts = handshakes->accept_again_ns <= clock_now_ns();
    const int64_t due_ns = handshakes->count ? handshakes->strangers[0].deadline_ns : CLOCK_NEVER;
    for (int i = 0; i < HANDSHAKE_LISTENERS; i++)
        polls[i] = (struct pollfd){.fd = accepts ? handshakes->listeners[i] : -1, .events = POLLIN};
    for (int i = 0; i < handshakes->count; i++)
        polls[HANDSHAKE_LISTENERS + i] = (struct pollfd){.fd = handshakes->strangers[i].fd, .events = POLLIN};
    handshakes->unserved = handshakes->count;
    *wake_ns = due_ns < *wake_ns ? due_ns : *wake_ns;
    if (!accepts && handshakes->accept_again_ns < *wake_ns)
        *wake_ns = handshakes->accept_again_ns;
    return HANDSHAKE_LISTENERS + handshakes->count;
}

// After the poll, with these entries, until it is not BHVD_OK: the next stranger that has sent its introduction, which is
// not checked yet. The caller owns its descriptor.
// BHVD_ERR_TIMEOUT: no more. BHVD_ERR_SYSTEM, with errno: no more, and this process has lacked descriptors or memory to accept
// connections for HANDSHAKE_LACKING_MS.
static bhvd_status handshake_server_next(struct handshake_server *handshakes, struct pollfd *polls, struct stranger *out)
{
    const int64_t now_ns = clock_now_ns();
    // In descending order, so that a removal does not move the strangers that are still to be served.
    while (handshakes->unserved > 0) {
        const int i = --handshakes->unserved;
        struct stranger *s = &handshakes->strangers[i];
        const bhvd_status status = polls[HANDSHAKE_LISTENERS + i].revents
                                       ? socket_read_part(s->fd, &s->introduction, sizeof s->introduction, &s->moved)
                                       : BHVD_IN_PROGRESS;
        if (!status) {
            *out = *s;
            forget(handshakes, i);
            return BHVD_OK;
        }
        if (status != BHVD_IN_PROGRESS || s->deadline_ns <= now_ns)
            drop(handshakes, i);
    }
    for (int i = 0; i < HANDSHAKE_LISTENERS; i++) {
        bhvd_status status = polls[i].revents ? accept_some(handshakes, i) : BHVD_OK;
        polls[i].revents = 0;
        if (status)
            return status;
    }
    return BHVD_ERR_TIMEOUT;
}

// ------------------------------------------------------------------------------------------------------------ arrivals

// The channels that a rank has connected so far, except CHANNEL_LOCAL, which it may try again.
struct known {
    uint16_t channels;                  // a bit mask
    uint8_t data_channels;
};

_Static_assert(CHANNEL_DATA + LINK_DATA_CHANNELS_MAX == BHVD_CHANNELS, "each channel has proofs");

struct listener {
    struct listener_options options;
    _Atomic bool closed;
    _Atomic int count;                  // number of arrivals
    pthread_mutex_t lock;               // of arrivals and connector.wanted
    struct FIFO(struct arrival) arrivals;
    struct known *known;                // owned by the thread, as are the next two
    struct handshake_server handshakes;
    struct connector connector;
    pthread_t thread;
    int wake_fd;                        // an eventfd that wakes the thread for connections to be made and for its end
};

static void put(struct listener *listener, struct arrival *arrival)
{
    pthread_mutex_lock(&listener->lock);
    fifo_put(&listener->arrivals, arrival, next);
    atomic_fetch_add(&listener->count, 1);
    pthread_mutex_unlock(&listener->lock);
    eventfd_write(listener->options.doorbell_fd, 1);
}

bool listener_has_arrivals(const struct listener *listener) { return atomic_load_explicit(&listener->count, memory_order_relaxed); }

struct arrival *listener_take(struct listener *listener)
{
    pthread_mutex_lock(&listener->lock);
    struct arrival *arrival = fifo_take(&listener->arrivals, next);
    if (arrival)
        atomic_fetch_sub(&listener->count, 1);
    pthread_mutex_unlock(&listener->lock);
    return arrival;
}

// --------------------------------------------------------------------------------------------------------- incoming connections

static bool is_valid(const struct listener *listener, const struct introduction *introduction, bool local)
{
    if (introduction->caller <= listener->options.rank || introduction->caller >= listener->options.size ||
        introduction->channel >= BHVD_CHANNELS || (introduction->channel == CHANNEL_LOCAL) != local)
        return false;
    const struct known *known = &listener->known[introduction->caller];
    const struct listener_options *o = &listener->options;
    if (!auth_matches(introduction->proof, o->proofs[introduction->caller].received[introduction->channel]) ||
        known->channels & 1u << introduction->channel)
        return false;
    const uint32_t requested = (uint32_t)endpoint_data_channels(&o->endpoints[o->rank], &o->endpoints[introduction->caller]);
    if (introduction->channel == CHANNEL_CONTROL)
        return introduction->data_channels >= 1 && introduction->data_channels <= LINK_DATA_CHANNELS_MAX &&
               (!requested || introduction->data_channels == requested);
    return introduction->channel < CHANNEL_DATA || introduction->channel - CHANNEL_DATA < known->data_channels;
}

static bool let_in(struct listener *listener, const struct stranger *peer)
{
    const struct introduction *introduction = &peer->introduction;
    const bool local = peer->listener == HANDSHAKE_LOCAL;
    if (!is_valid(listener, introduction, local))
        return false;
    struct known *known = &listener->known[introduction->caller];
    if (!local)                         // also if the response fails: nobody may repeat the introduction
        known->channels |= (uint16_t)(1u << introduction->channel);
    struct arrival *arrival = arrival_create(introduction->caller, introduction->channel);
    const struct bhvd_proofs *proofs = &listener->options.proofs[introduction->caller];
    if (!arrival || socket_write_at_once(peer->fd, proofs->sent[introduction->channel], BHVD_PROOF_BYTES)) {
        arrival_destroy(arrival);
        return false;
    }
    arrival->fd = peer->fd;
    if (introduction->channel == CHANNEL_CONTROL) {
        arrival->data_channel_count = (int)introduction->data_channels;
        arrival->round_trip_ns = socket_round_trip_ns(peer->fd);
        known->data_channels = (uint8_t)introduction->data_channels;
    }
    put(listener, arrival);
    return true;
}

// Reports the error once: it ends the job.
static void report(struct listener *listener, bool *reported)
{
    const int failure = errno;
    struct arrival *arrival = *reported ? NULL : arrival_create(-1, CHANNEL_CONTROL);
    if (arrival) {
        error_set(&arrival->error, BHVD_ERR_SYSTEM, "the connections of the other ranks cannot be accepted: %s%s",
                  strerror(failure), socket_remedy(failure));
        put(listener, arrival);
    }
    *reported = true;
}

static void accept_ready(struct listener *listener, struct pollfd *polls, bool *reported)
{
    struct stranger peer;
    bhvd_status status;
    while (!(status = handshake_server_next(&listener->handshakes, polls, &peer))) {
        if (!let_in(listener, &peer))
            close(peer.fd);
    }
    if (status == BHVD_ERR_SYSTEM)
        report(listener, reported);
}

// --------------------------------------------------------------------------------------------------------- outgoing connections

bhvd_status listener_open(struct listener *listener, int rank, uint32_t channel, int64_t start_deadline_ns)
{
    const struct listener_options *o = &listener->options;
    struct arrival *arrival = arrival_create(rank, channel);
    if (!arrival)
        return BHVD_ERR_SYSTEM;
    arrival->is_at_start = start_deadline_ns != 0;
    arrival->connect_deadline_ns = start_deadline_ns ? start_deadline_ns : clock_deadline_ns(o->connect_ms);
    arrival->deadline_ns = start_deadline_ns ? start_deadline_ns : clock_deadline_ns(o->open_ms);
    pthread_mutex_lock(&listener->lock);
    fifo_put(&listener->connector.wanted, arrival, next);
    pthread_mutex_unlock(&listener->lock);
    eventfd_write(listener->wake_fd, 1);
    return BHVD_OK;
}

bhvd_status listener_handshake_local(struct listener *listener, int rank, int fd, int64_t deadline_ns, struct bhvd_error *error)
{
    const struct bhvd_proofs *proofs = &listener->options.proofs[rank];
    struct introduction introduction = {listener->options.rank, CHANNEL_LOCAL, 1, {0}};
    uint8_t proof[BHVD_PROOF_BYTES];
    memcpy(introduction.proof, proofs->sent[CHANNEL_LOCAL], sizeof introduction.proof);
    bhvd_status status = socket_write_at_once(fd, &introduction, sizeof introduction);
    status = status ? status : socket_read_full(fd, proof, sizeof proof, deadline_ns);
    return auth_explain(status || auth_matches(proof, proofs->received[CHANNEL_LOCAL]) ? status : BHVD_ERR_AUTH, error);
}

// ------------------------------------------------------------------------------------------------------------------ the listener

static void *listener_main(void *arg)
{
    struct listener *listener = arg;
    struct pollfd polls[1 + HANDSHAKE_POLLS_MAX + CONNECTOR_POLLS_MAX] = {{.fd = listener->wake_fd, .events = POLLIN}};
    bool reported = false;
    while (!atomic_load(&listener->closed)) {
        int64_t wake_ns = CLOCK_NEVER;
        const int incoming = handshake_server_poll(&listener->handshakes, polls + 1, &wake_ns);
        struct pollfd *others = polls + 1 + incoming;
        pthread_mutex_lock(&listener->lock);
        const int outgoing = connector_poll(&listener->connector, others, &wake_ns);
        pthread_mutex_unlock(&listener->lock);
        socket_poll(polls, 1 + (size_t)(incoming + outgoing), wake_ns);
        if (polls[0].revents)
            eventfd_read(listener->wake_fd, &(eventfd_t){0});
        for (struct arrival *arrival; (arrival = connector_next(&listener->connector, others));)
            put(listener, arrival);
        accept_ready(listener, polls + 1, &reported);
    }
    return NULL;
}

// Closes connections in progress.
static void hang_up(struct listener *listener)
{
    connector_close(&listener->connector);
    handshake_server_close(&listener->handshakes);
}

static void listener_free(struct listener *listener)
{
    hang_up(listener);
    for (struct arrival *arrival; (arrival = listener_take(listener));)
        arrival_destroy(arrival);
    listener_after_fork(listener);
    free(listener->known);
    pthread_mutex_destroy(&listener->lock);
    free(listener);
}

bhvd_status listener_create(const struct listener_options *options, struct listener **out, struct bhvd_error *error)
{
    struct listener *listener = calloc(1, sizeof *listener);
    *out = NULL;
    if (!listener)
        return error_set(error, BHVD_ERR_SYSTEM, "no memory for %d ranks", options->size);
    listener->options = *options;
    listener->options.doorbell_fd = fcntl(options->doorbell_fd, F_DUPFD_CLOEXEC, 0);
    listener->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    pthread_mutex_init(&listener->lock, NULL);
    listener->known = calloc((size_t)options->size, sizeof *listener->known);
    listener->handshakes.listeners[HANDSHAKE_TCP] = options->tcp_listen_fd;
    listener->handshakes.listeners[HANDSHAKE_LOCAL] = options->local_listen_fd;
    listener->connector = (struct connector){.rank = options->rank, .endpoints = options->endpoints, .proofs = options->proofs};
    if (!listener->known || listener->options.doorbell_fd < 0 || listener->wake_fd < 0 ||
        thread_create(&listener->thread, listener_main, listener) != 0) {
        listener_free(listener);
        return error_set(error, BHVD_ERR_SYSTEM, "no memory or descriptor to accept connections from %d ranks", options->size);
    }
    *out = listener;
    return BHVD_OK;
}

void listener_close(struct listener *listener)
{
    if (!listener || atomic_exchange(&listener->closed, true))
        return;
    eventfd_write(listener->wake_fd, 1);
    pthread_join(listener->thread, NULL);
    hang_up(listener);
    fd_close(&listener->options.tcp_listen_fd);
    fd_close(&listener->options.local_listen_fd);
}

void listener_destroy(struct listener *listener)
{
    listener_close(listener);
    if (listener)
        listener_free(listener);
}

void listener_after_fork(struct listener *listener)
{
    if (!listener)
        return;
    handshake_server_close(&listener->handshakes);
    connector_after_fork(&listener->connector);
    for (struct arrival *arrival = listener->arrivals.head; arrival; arrival = arrival->next)
        fd_close(&arrival->fd);
    fd_close(&listener->options.tcp_listen_fd);
    fd_close(&listener->options.local_listen_fd);
    fd_close(&listener->options.doorbell_fd);
    fd_close(&listener->wake_fd);
}
