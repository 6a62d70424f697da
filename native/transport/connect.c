// Connecting: (1) every rank opens a TCP listener and, if it may share memory, a UNIX one; (2) all ranks gather endpoints with
// their addresses; (3) of each pair that communicates from the beginning, the higher rank connects to the lower one and both
// authenticate. On one host these are all pairs, which then use shared memory (the host's first rank sends the memfd,
// every rank its doorbell); between hosts the pairs of the negotiation, in small jobs all, with control channels only; (4)
// transport "mpi": all pairs, and data channels to other hosts are MPI's. The remaining channels of a link are connected when a
// message is first posted over it, in small jobs at once.
#include "transport/connect.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/status.h"
#include "transport/listener.h"
#include "transport/socket.h"

enum {
    SMALL = 8,                          // up to this many ranks, all links are connected from the beginning
    LOCAL_JOIN_MS = 5000                // limit for the rest of a UNIX connection after the handshake
};

// -------------------------------------------------------------------------------------------------------- endpoints

static void read_line(const char *path, char *out, size_t size)
{
    FILE *file = fopen(path, "re");
    out[0] = '\0';
    if (file) {
        if (fgets(out, (int)size, file))
            out[strcspn(out, "\n")] = '\0';
        fclose(file);
    }
}

// Equal if and only if two ranks can share memory: same boot of the same machine, same network namespace (to which the names of
// UNIX sockets belong).
static void derive_host_id(char *out, size_t size)
{
    char boot[64], name[64] = "", space[64] = "";
    read_line("/proc/sys/kernel/random/boot_id", boot, sizeof boot);
    gethostname(name, sizeof name - 1);
    if (readlink("/proc/self/ns/net", space, sizeof space - 1) < 0)
        space[0] = '\0';
    snprintf(out, size, "%s/%s/%s", name, boot, space);
}

static bool may_share(const struct bhvd_context_options *options) { return strcmp(options->transport, "tcp") != 0; }
static bool uses_mpi(const struct bhvd_context_options *options) { return strcmp(options->transport, "mpi") == 0; }

static bhvd_status fill_endpoint(struct connecting *k, struct endpoint *info)
{
    const struct bhvd_context_options *options = k->options;
    int port;
    *info = (struct endpoint){.magic = ENDPOINT_MAGIC, .protocol = ENDPOINT_PROTOCOL, .rank = options->rank};
    snprintf(info->version, sizeof info->version, "%s", bhvd_version());
    if (getrandom(info->nonce, sizeof info->nonce, 0) != sizeof info->nonce)    // up to 256 bytes come completely or not at all
        return error_set(k->error, BHVD_ERR_SYSTEM, "no random numbers: %s", strerror(errno));
    bhvd_status status = socket_listen(options->listen_host, options->listen_port, options->listen_port_last, &k->tcp_listen_fd,
                                       &port, k->error);
    if (status)
        return status;
    info->port = port;
    info->uses_mpi = uses_mpi(options);
    info->data_channels = uses_mpi(options) ? 1 : options->streams;
    snprintf(info->host, sizeof info->host, "%s", options->listen_host);
    snprintf(info->allreduce_path, sizeof info->allreduce_path, "%s",
             options->allreduce_path ? options->allreduce_path : "");
    snprintf(info->negotiation, sizeof info->negotiation, "%s", options->negotiation ? options->negotiation : "");
    info->negotiation_fanout = options->negotiation_fanout;
    if (!may_share(options))
        return BHVD_OK;
    if (options->host_id)
        snprintf(info->host_id, sizeof info->host_id, "%s", options->host_id);
    else
        derive_host_id(info->host_id, sizeof info->host_id);
    return BHVD_OK;
}

// All ranks have the same data, so all report the same error.
static bhvd_status check_endpoint(const struct connecting *k, int rank)
{
    const struct endpoint *info = &k->c->endpoints[rank], *first = &k->c->endpoints[0];
    if (info->magic != ENDPOINT_MAGIC)
        return error_set(k->error, BHVD_ERR_MISMATCH, "rank %d runs a version of bagua_hvd before 0.2, or has another byte order: "
                         "install the same version on every host", rank);
    if (strcmp(info->version, first->version) != 0 || info->protocol != first->protocol)
        return error_set(k->error, BHVD_ERR_MISMATCH, "rank 0 runs bagua_hvd %s (protocol %u), but rank %d runs %s (protocol %u): "
                         "install the same version on every host", first->version, first->protocol, rank, info->version,
                         info->protocol);
    if (info->rank != rank || info->data_channels < 0 || info->data_channels > LINK_DATA_CHANNELS_MAX)
        return error_set(k->error, BHVD_ERR_MISMATCH, "rank %d sent an address that cannot be read", rank);
    if (strcmp(info->allreduce_path, first->allreduce_path) != 0)
        return error_set(k->error, BHVD_ERR_MISMATCH,
                         "BAGUA_HVD_ALLREDUCE is \"%s\" on rank 0 but \"%s\" on rank %d: give all ranks the same",
                         first->allreduce_path, info->allreduce_path, rank);
    if (strcmp(info->negotiation, first->negotiation) != 0 || info->negotiation_fanout != first->negotiation_fanout)
        return error_set(k->error, BHVD_ERR_MISMATCH,
                         "BAGUA_HVD_NEGOTIATION is \"%s\" and BAGUA_HVD_NEGOTIATION_FANOUT %d on rank 0 but \"%s\" "
                         "and %d on rank %d: give all ranks the same", first->negotiation, first->negotiation_fanout,
                         info->negotiation, info->negotiation_fanout, rank);
    if (info->uses_mpi != first->uses_mpi)
        return error_set(k->error, BHVD_ERR_MISMATCH,
                         "transport \"mpi\" is used by rank %d but not by rank %d: give all ranks the same "
                         "BAGUA_HVD_TRANSPORT", info->uses_mpi ? rank : 0, info->uses_mpi ? 0 : rank);
    return BHVD_OK;
}

static bhvd_status gather_endpoints(struct connecting *k, const struct endpoint *mine)
{
    const struct bhvd_context_options *options = k->options;
    k->c->endpoints = calloc((size_t)options->size, sizeof *k->c->endpoints);
    k->c->proofs = calloc((size_t)options->size, sizeof *k->c->proofs);
    if (!k->c->endpoints || !k->c->proofs)
        return error_set(k->error, BHVD_ERR_SYSTEM, "no memory for %d ranks", options->size);
    bhvd_status status = options->gather(options->user, mine, sizeof *mine, k->c->endpoints, k->c->proofs, k->error);
    for (int rank = 0; rank < options->size; rank++) {
        struct endpoint *info = &k->c->endpoints[rank];
        info->version[sizeof info->version - 1] = info->host[sizeof info->host - 1] = '\0';
        info->host_id[sizeof info->host_id - 1] = info->negotiation[sizeof info->negotiation - 1] = '\0';
        info->allreduce_path[sizeof info->allreduce_path - 1] = '\0';
    }
    for (int rank = 0; rank < options->size && !status; rank++)
        status = check_endpoint(k, rank);
    return status;
}

static bool share_memory(const struct connecting *k, int rank, int other)
{
    const struct endpoint *endpoints = k->c->endpoints;
    return endpoints[rank].host_id[0] && strcmp(endpoints[rank].host_id, endpoints[other].host_id) == 0;
}

bool connecting_shares_memory(const struct connecting *k, int rank) { return share_memory(k, k->c->rank, rank); }

// Equal on all ranks, since all have the same data.
static void count_hosts(const struct connecting *k)
{
    int hosts = 0;
    for (int rank = 0; rank < k->c->size; rank++) {
        int first = 0;
        while (first < rank && !share_memory(k, rank, first))
            first++;
        k->c->host_of[rank] = first < rank ? k->c->host_of[first] : hosts++;
    }
}

// ---------------------------------------------------------------------------------------------------- all connections

static void use_socket(struct channel *channel, struct arrival *arrival)
{
    if (!channel->ops)                  // bhvd_context_counters reads it on other threads
        channel->ops = &channel_tcp_ops;
    channel->fd = arrival->fd;
    arrival->fd = -1;
}

// Adds an arrival to its link and ignores one that does not fit. A rank's goodbye may be read before its data channels are taken
// from the listener; they are still used, since they may hold data.
static void use_arrival(const struct connections *c, struct link *link, struct arrival *arrival)
{
    if (arrival->channel == CHANNEL_CONTROL && link->state == LINK_UNCONNECTED) {
        link->data_channel_count = arrival->data_channel_count;
        link->round_trip_ns = arrival->round_trip_ns;
        use_socket(&link->control, arrival);
        link->state = LINK_OPEN;
    } else if (arrival->channel >= CHANNEL_DATA && (link->state == LINK_OPEN || link->state == LINK_DEPARTED)) {
        socket_limit_rate(arrival->fd, c->emulated_bytes_per_s);
        use_socket(&link->data_channels[arrival->channel - CHANNEL_DATA].channel, arrival);
        link->lacks_data_channels = false;
        for (int i = 0; i < link->data_channel_count; i++)
            link->lacks_data_channels = link->lacks_data_channels || link->data_channels[i].channel.fd < 0;
    }
}

static int first_missing(const struct connecting *k)
{
    for (int rank = 0; rank < k->c->size; rank++) {
        const struct link *link = &k->c->links[rank];
        if (rank != k->c->rank &&
            (connecting_shares_memory(k, rank) ? link->liveness_fd < 0 : k->talks_to[rank] && link->control.fd < 0))
            return rank;
    }
    return -1;
}

static bhvd_status take_arrival(struct connecting *k, struct arrival *arrival)
{
    bhvd_status status = BHVD_OK;
    if (arrival->error.status) {
        status = arrival->error.status;
        *k->error = arrival->error;
    } else if (arrival->channel != CHANNEL_LOCAL) {
        use_arrival(k->c, &k->c->links[arrival->rank], arrival);
    } else if (connecting_shares_memory(k, arrival->rank) && k->c->links[arrival->rank].liveness_fd < 0) {
        const bhvd_status joined = local_join(k, arrival->rank, arrival->fd, clock_deadline_ns(LOCAL_JOIN_MS));
        if (!joined)
            arrival->fd = -1;
        else if (joined == BHVD_ERR_SYSTEM)
            status = joined;            // this rank lacks a resource; a peer that hung up retries
    }
    arrival_destroy(arrival);
    return status;
}

// Timeouts of links to lower ranks are reported by the connector.
static bhvd_status await_all(struct connecting *k)
{
    bhvd_status status = BHVD_OK;
    for (int missing; !status && (missing = first_missing(k)) >= 0;) {
        struct arrival *arrival = listener_take(k->c->listener);
        struct pollfd doorbell = {.fd = k->c->doorbell.fd, .events = POLLIN};
        const int left_ms = clock_remaining_ms(k->deadline_ns);
        if (arrival)
            status = take_arrival(k, arrival);
        else if (left_ms == 0 && missing > k->c->rank)
            status = error_set(k->error, BHVD_ERR_TIMEOUT, "rank %d did not connect within %.0f s", missing,
                               k->options->start_timeout_ms / 1000.0);
        else if (poll(&doorbell, 1, left_ms ? left_ms : CONNECTOR_RETRY_MS) > 0)
            doorbell_drain(&k->c->doorbell);
    }
    return status;
}

static bhvd_status connect_all(struct connecting *k)
{
    struct connections *c = k->c;
    bhvd_status status = BHVD_OK;
    for (int rank = 0; rank < c->size; rank++) {
        struct link *link = &c->links[rank];
        if (rank == c->rank || connecting_shares_memory(k, rank))
            continue;
        link->state = LINK_UNCONNECTED;
        link->lacks_data_channels = !uses_mpi(k->options);
        link->data_channels[0].channel.ops = &channel_tcp_ops;
    }
    // The memory comes from the host's lowest rank, to which the others connect first.
    if (c->local_index == 0)
        status = local_make_memory(k);
    for (int rank = 0; rank < c->rank && !status; rank++)
        if (!connecting_shares_memory(k, rank) && k->talks_to[rank] &&
            listener_open(c->listener, rank, CHANNEL_CONTROL, k->deadline_ns))
            status = error_set(k->error, BHVD_ERR_SYSTEM, "no memory for a connection to rank %d", rank);
    for (int rank = 0; rank < c->rank && !status; rank++)
        if (connecting_shares_memory(k, rank))
            status = local_connect(k, rank);
    if (!status)
        status = await_all(k);
    for (int rank = 0; rank < c->rank && c->size <= SMALL && !status; rank++)
        if (connections_open(c, &c->links[rank]))
            status = error_set(k->error, BHVD_ERR_SYSTEM, "no memory for a connection to rank %d", rank);
    return status;
}

static bhvd_status open_listener(struct connecting *k)
{
    const struct bhvd_context_options *options = k->options;
    const int silence_ms = options->heartbeat_timeout_ms > 0 ? options->heartbeat_timeout_ms / 8 * 7 : options->timeout_ms;
    bhvd_status status = listener_create(&(struct listener_options){
        .rank = options->rank, .size = options->size, .tcp_listen_fd = k->tcp_listen_fd, .local_listen_fd = k->local_listen_fd,
        .endpoints = k->c->endpoints, .proofs = k->c->proofs,
        .doorbell_fd = k->c->doorbell.fd, .connect_ms = silence_ms, .open_ms = options->timeout_ms}, &k->c->listener, k->error);
    k->tcp_listen_fd = k->local_listen_fd = -1;
    return status;
}

// Closes the listener if no more connections will be made, so that no port stays open.
static void close_needless_listener(struct connections *c)
{
    for (int rank = 0; rank < c->size; rank++)
        if (c->links[rank].lacks_data_channels)
            return;
    listener_close(c->listener);
}

// With MPI the control channels detect a rank's death, so every pair has one. In small jobs the first step waits for no link.
static bhvd_status choose(struct connecting *k, choose_fn chooses)
{
    k->talks_to = calloc((size_t)k->c->size, sizeof *k->talks_to);
    bool there = k->talks_to;
    if (there && (uses_mpi(k->options) || k->c->size <= SMALL))
        memset(k->talks_to, true, (size_t)k->c->size * sizeof *k->talks_to);
    else if (there)
        there = chooses(k->options, k->c->host_of, k->talks_to);
    return there ? BHVD_OK : error_set(k->error, BHVD_ERR_SYSTEM, "no memory for %d ranks", k->c->size);
}

static bhvd_status connect_network(struct connections *c, const struct bhvd_context_options *options, choose_fn chooses,
                                   struct bhvd_error *error)
{
    struct connecting k = {
        .c = c, .options = options, .tcp_listen_fd = -1, .local_listen_fd = -1, .memory_fd = -1,
        .deadline_ns = clock_deadline_ns(options->start_timeout_ms), .error = error};
    struct endpoint mine;
    bhvd_status status = fill_endpoint(&k, &mine);
    if (!status && may_share(options))
        status = local_listen(&k, &mine);
    if (!status)
        status = gather_endpoints(&k, &mine);
    if (!status)
        count_hosts(&k);
    for (int rank = 0; rank < c->size && !status; rank++) {
        bool local = rank == c->rank || connecting_shares_memory(&k, rank);
        c->local_size += local;
        c->local_index += local && rank < c->rank;
        if (!local && strcmp(options->transport, "shm") == 0)
            status = error_set(error, BHVD_ERR_ARGUMENT,
                               "transport \"shm\" needs all ranks on one host, but rank %d is on another; use \"auto\"",
                               rank);
    }
    if (!status)
        status = choose(&k, chooses);
    if (!status)
        status = open_listener(&k);
    if (!status)
        status = connect_all(&k);
    if (!status && !uses_mpi(options))
        status = probe_lines(&k);
    if (!status)
        close_needless_listener(c);
    if (!status && uses_mpi(options))
        status = mpi_connect(c, k.deadline_ns, error);
    free(k.talks_to);
    fd_close(&k.tcp_listen_fd);
    fd_close(&k.local_listen_fd);
    fd_close(&k.memory_fd);
    return status;
}

static bhvd_status connect_alone(struct connections *c, struct bhvd_error *error)
{
    c->local_size = 1;
    struct connecting k = {.c = c, .memory_fd = -1, .error = error};
    bhvd_status status = local_make_memory(&k);
    fd_close(&k.memory_fd);
    return status;
}

static bhvd_status check_options(const struct bhvd_context_options *options, struct bhvd_error *error)
{
    static const char *const transports[] = {"auto", "shm", "tcp", "mpi", "inproc"};
    bool known = false;
    for (size_t i = 0; i < sizeof transports / sizeof transports[0]; i++)
        known |= options->transport && strcmp(options->transport, transports[i]) == 0;
    if (!known)
        return error_set(error, BHVD_ERR_ARGUMENT, "unknown transport \"%s\"; known are auto, shm, tcp, mpi, inproc",
                         options->transport ? options->transport : "");
    if (options->streams < 0 || options->streams > LINK_DATA_CHANNELS_MAX)
        return error_set(error, BHVD_ERR_ARGUMENT, "%d streams to each rank: 1 to %d are possible", options->streams,
                         LINK_DATA_CHANNELS_MAX);
    if (options->size < 1 || options->rank < 0 || options->rank >= options->size)
        return error_set(error, BHVD_ERR_ARGUMENT, "rank %d of %d does not exist", options->rank, options->size);
    if (options->size > 1 && strcmp(options->transport, "inproc") != 0 &&
        (!options->gather || !options->listen_host))
        return error_set(error, BHVD_ERR_ARGUMENT, "a job of %d ranks needs gather and listen_host", options->size);
    if (options->size > 1 && uses_mpi(options))
        return mpi_check(options->rank, options->size, error);
    return BHVD_OK;
}

bhvd_status connections_init(struct connections *c, const struct bhvd_context_options *options, choose_fn chooses,
                             struct bhvd_error *error)
{
    *c = (struct connections){.rank = options->rank, .size = options->size, .doorbell = {.fd = -1}, .poller = {.fd = -1},
                              .emulated_bytes_per_s = options->emulated_bytes_per_s};
    error_clear(error);
    bhvd_status status = check_options(options, error);
    if (status)
        return status;
    c->links = calloc((size_t)c->size, sizeof *c->links);
    c->host_of = calloc((size_t)c->size, sizeof *c->host_of);       // one host, unless the endpoints say otherwise
    if (!c->links || !c->host_of) {
        free(c->links);
        free(c->host_of);
        return error_set(error, BHVD_ERR_SYSTEM, "no memory for %d ranks", c->size);
    }
    for (int rank = 0; rank < c->size; rank++)
        link_init(&c->links[rank], rank, &c->started);
    bool inproc = strcmp(options->transport, "inproc") == 0;
    if (!inproc)
        c->doorbell.fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    if (!inproc && c->doorbell.fd < 0)
        status = error_set(error, BHVD_ERR_SYSTEM, "cannot make an eventfd: %s%s", strerror(errno), socket_remedy(errno));
    else
        status = inproc         ? inproc_connect(c, options->inproc_world, error)
                 : c->size == 1 ? connect_alone(c, error)
                                : connect_network(c, options, chooses, error);
    if (!status && poller_init(&c->poller, c->links, c->size, c->rank))
        status = error_set(error, BHVD_ERR_SYSTEM, "the connections to %d ranks cannot be polled: %s%s", c->size,
                           strerror(errno), socket_remedy(errno));
    if (status)
        connections_fini(c);
    return status;
}

void connections_close(struct connections *c)
{
    mpi_disconnect(c);
    listener_close(c->listener);
}

bhvd_status connections_open(struct connections *c, struct link *link)
{
    bhvd_status status = BHVD_OK;
    if (link->opening || !link->lacks_data_channels || c->rank < link->rank)
        return BHVD_OK;
    if (link->state == LINK_UNCONNECTED && !(status = listener_open(c->listener, link->rank, CHANNEL_CONTROL, 0)))
        link->opening++;
    for (int i = 0; link->state == LINK_OPEN && i < link->data_channel_count && !status; i++)
        if (link->data_channels[i].channel.fd < 0 &&
            !(status = listener_open(c->listener, link->rank, CHANNEL_DATA + (uint32_t)i, 0)))
            link->opening++;
    return status;
}

bool connections_have_arrivals(const struct connections *c) { return c->listener && listener_has_arrivals(c->listener); }

struct link *connections_take(struct connections *c, struct bhvd_error *error)
{
    struct arrival *arrival = listener_take(c->listener);
    struct link *link = NULL;
    error_clear(error);
    if (!arrival)
        return NULL;
    *error = arrival->error;
    if (arrival->rank >= 0 && arrival->channel != CHANNEL_LOCAL) {
        link = &c->links[arrival->rank];
        link->opening -= link->rank < c->rank;
        if (!error->status)
            use_arrival(c, link, arrival);
    }
    arrival_destroy(arrival);
    return link;
}

void connections_fini(struct connections *c)
{
    mpi_disconnect(c);
    listener_destroy(c->listener);
    poller_fini(&c->poller);
    for (int rank = 0; rank < c->size && c->links; rank++)
        link_fini(&c->links[rank]);
    free(c->links);
    free(c->endpoints);
    free(c->proofs);
    free(c->host_of);
    fd_close(&c->doorbell.fd);
    if (c->owns_shm_segment)
        munmap(c->shm.base, c->shm.size);
    *c = (struct connections){.doorbell = {.fd = -1}, .poller = {.fd = -1}};
}
