#include "transport/connector.h"

#include <errno.h>
#include <stdlib.h>

#include "base/clock.h"
#include "base/status.h"

enum {
    REFUSED_MS = 1000,                  // after a refusal: by then another rank may have reported why the peer ended
    SYSTEM_MS = 5000,                   // this process lacks descriptors or memory, perhaps for a moment
    FAR_DATA_CHANNELS = 4
};

struct arrival *arrival_create(int rank, uint32_t channel)
{
    struct arrival *arrival = malloc(sizeof *arrival);
    if (arrival)
        *arrival = (struct arrival){.rank = rank, .channel = channel, .fd = -1};
    return arrival;
}

void arrival_destroy(struct arrival *arrival)
{
    if (arrival)
        fd_close(&arrival->fd);
    free(arrival);
}

// ------------------------------------------------------------------------------------------------------------- attempts

// Linux keeps at most about 4 MB of a connection in flight, which fills a link of 1 Gbit/s up to a round trip of 30 ms. With
// several connections a lost packet slows down only one of them.
static int data_channels_for(int64_t round_trip_ns) { return round_trip_ns >= SOCKET_FAR_NS ? FAR_DATA_CHANNELS : 1; }

// The rank is gone: its port is closed, or another program has it now.
static bool is_somebody_else(bhvd_status status, int failure)
{
    return status == BHVD_ERR_AUTH || failure == ECONNREFUSED || failure == ECONNRESET;
}

// How long a failure may persist, in ms; negative: until the deadline.
static int retry_limit_ms(const struct arrival *arrival, bhvd_status status, int failure)
{
    if (status == BHVD_ERR_PEER_LOST)
        return -1;                      // no route, or the peer hung up, as it does on strangers
    if (status == BHVD_ERR_TIMEOUT || arrival->is_at_start)
        return 0;
    return is_somebody_else(status, failure) ? REFUSED_MS : SYSTEM_MS;
}

// Pauses before another attempt, or gives up with this error. failure: an errno, or 0. True: it has given up.
static bool fail(struct attempt *a, int own_rank, int failure, const struct bhvd_error *error)
{
    const int limit_ms = retry_limit_ms(a->arrival, error->status, failure);
    const int64_t now_ns = clock_now_ns();
    a->failing_since_ns = a->failing_since_ns ? a->failing_since_ns : now_ns;
    fd_close(&a->fd);
    a->stage = PAUSED;
    a->wake_ns = now_ns + clock_ms_ns(CONNECTOR_RETRY_MS);
    const int64_t end_ns = failure ? a->arrival->connect_deadline_ns : a->arrival->deadline_ns;
    if (now_ns < end_ns && (limit_ms < 0 || now_ns < a->failing_since_ns + clock_ms_ns(limit_ms)))
        return false;
    const bool is_gone = is_somebody_else(error->status, failure) && !a->arrival->is_at_start;
    error_set(&a->arrival->error, is_gone ? BHVD_ERR_PEER_LOST : error->status, "no connection from rank %d to rank %d: %.900s",
              own_rank, a->arrival->rank, error->message);
    return true;
}

static void enter(struct attempt *a, enum attempt_stage stage)
{
    a->stage = stage;
    a->wake_ns = stage == CONNECTING ? a->arrival->connect_deadline_ns : a->arrival->deadline_ns;
}

static const struct endpoint *peer_of(const struct connector *connector, const struct attempt *a)
{
    return &connector->endpoints[a->arrival->rank];
}

static bhvd_status introduce(const struct connector *connector, struct attempt *a, struct bhvd_error *error)
{
    struct arrival *arrival = a->arrival;
    const int requested = endpoint_data_channels(&connector->endpoints[connector->rank], peer_of(connector, a));
    arrival->data_channel_count = requested ? requested : data_channels_for(socket_round_trip_ns(a->fd));
    a->moved = 0;
    enter(a, HANDSHAKE);
    struct introduction introduction = {connector->rank, arrival->channel, (uint32_t)arrival->data_channel_count, {0}};
    memcpy(introduction.proof, connector->proofs[arrival->rank].sent[arrival->channel], sizeof introduction.proof);
    return auth_explain(socket_write_at_once(a->fd, &introduction, sizeof introduction), error);
}

// BHVD_OK: the channel is connected. BHVD_IN_PROGRESS: not yet.
static bhvd_status read_proof(const struct connector *connector, struct attempt *a, struct bhvd_error *error)
{
    const bhvd_status status = socket_read_part(a->fd, a->proof, sizeof a->proof, &a->moved);
    const struct bhvd_proofs *proofs = &connector->proofs[a->arrival->rank];
    const bool is_wrong = !status && !auth_matches(a->proof, proofs->received[a->arrival->channel]);
    return auth_explain(is_wrong ? BHVD_ERR_AUTH : status, error);
}

static bhvd_status connect_begin(const struct connector *connector, struct attempt *a, struct bhvd_error *error)
{
    const struct endpoint *peer = peer_of(connector, a);
    enter(a, CONNECTING);
    // On a control channel the bandwidth may be measured (probe.c).
    return socket_connect_begin(peer->host, peer->port,
                                a->arrival->channel == CHANNEL_CONTROL ? SOCKET_UNSPACED : NULL, &a->fd, error);
}

static bhvd_status give_up_waiting(const struct connector *connector, const struct attempt *a, struct bhvd_error *error)
{
    const struct endpoint *peer = peer_of(connector, a);
    if (a->stage != CONNECTING)
        return auth_explain(BHVD_ERR_TIMEOUT, error);
    return error_set(error, BHVD_ERR_TIMEOUT, "%s did not respond to a connection attempt",
                     socket_name(peer->host, peer->port).text);
}

// Returns whether it is connected or has given up.
static bool advance(const struct connector *connector, struct attempt *a, bool has_event)
{
    struct bhvd_error error = {0};
    bhvd_status status = BHVD_IN_PROGRESS;
    int failure = 0;
    errno = 0;
    if (a->stage == PAUSED) {
        if (a->wake_ns > clock_now_ns())
            return false;
        status = connect_begin(connector, a, &error);
        failure = status ? errno : 0;
        status = status ? status : BHVD_IN_PROGRESS;
    } else if (has_event && a->stage == CONNECTING) {
        const struct endpoint *peer = peer_of(connector, a);
        status = socket_connect_complete(a->fd, peer->host, peer->port, &error);
        failure = status ? errno : 0;
        status = status ? status : introduce(connector, a, &error);
        status = status ? status : BHVD_IN_PROGRESS;
    } else if (has_event) {
        status = read_proof(connector, a, &error);
    } else if (a->wake_ns <= clock_now_ns()) {
        status = give_up_waiting(connector, a, &error);
    }
    if (status == BHVD_IN_PROGRESS)
        return false;
    if (status)
        return fail(a, connector->rank, failure, &error);
    a->arrival->round_trip_ns = socket_round_trip_ns(a->fd);
    a->arrival->fd = a->fd;
    a->fd = -1;
    return true;
}

// ------------------------------------------------------------------------------------------------------------ connector

static struct arrival *end_attempt(struct attempt *a)
{
    struct arrival *arrival = a->arrival;
    if (arrival)
        fd_close(&a->fd);
    *a = (struct attempt){0};
    return arrival;
}

void connector_close(struct connector *connector)
{
    for (int i = 0; i < CONNECTOR_POLLS_MAX; i++)
        arrival_destroy(end_attempt(&connector->attempts[i]));
    for (struct arrival *arrival; (arrival = fifo_take(&connector->wanted, next));)
        arrival_destroy(arrival);
}

void connector_after_fork(struct connector *connector)
{
    for (int i = 0; i < CONNECTOR_POLLS_MAX; i++)
        if (connector->attempts[i].arrival)
            fd_close(&connector->attempts[i].fd);
}

// Polls only entries with a descriptor: poll() takes no more entries than this process may have descriptors.
int connector_poll(struct connector *connector, struct pollfd *polls, int64_t *wake_ns)
{
    int count = 0;
    for (int i = 0; i < CONNECTOR_POLLS_MAX; i++) {
        struct attempt *a = &connector->attempts[i];
        if (!a->arrival)
            *a = (struct attempt){.arrival = fifo_take(&connector->wanted, next), .fd = -1};
        a->poll = -1;
        if (!a->arrival)
            continue;
        if (a->fd >= 0) {
            a->poll = count;
            polls[count++] = (struct pollfd){.fd = a->fd, .events = a->stage == CONNECTING ? POLLOUT : POLLIN};
        }
        *wake_ns = a->wake_ns < *wake_ns ? a->wake_ns : *wake_ns;
    }
    connector->unserved = CONNECTOR_POLLS_MAX;
    return count;
}

struct arrival *connector_next(struct connector *connector, const struct pollfd *polls)
{
    while (connector->unserved > 0) {
        struct attempt *a = &connector->attempts[--connector->unserved];
        if (a->arrival && advance(connector, a, a->poll >= 0 && polls[a->poll].revents))
            return end_attempt(a);
    }
    return NULL;
}
