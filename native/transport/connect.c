// Connecting: (1) every rank opens a TCP listener and, when it may share memory, a UNIX one; (2) all exchange cards with
// their addresses at the rendezvous; (3) every rank connects to the lower ones and accepts the higher ones, proving the
// job's secret on each connection; (4) pairs on one host go on through memory: the host's first rank passes the memfd,
// everyone its bell; (5) transport "mpi": streams to other hosts become MPI's.
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

#include "base/bytes.h"
#include "base/clock.h"
#include "base/status.h"
#include "transport/auth.h"
#include "transport/channel_mpi.h"
#include "transport/connect_local.h"
#include "transport/greeter.h"
#include "transport/rendezvous.h"
#include "transport/socket.h"

enum {
    CARD_MAGIC = 0x41484742,            // "BGHA", also tells the byte order
    HELLO_MAGIC = 0x33484742,
    RETRY_MS = 50,
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

// ------------------------------------------------------------------------------------------------------------ cards

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

// Equal exactly on ranks that can share memory: same boot of the same machine, same network namespace (whose UNIX socket
// names they use).
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

static bhvd_status fill_card(struct connecting *k, struct card *card)
{
    const struct bhvd_context_options *options = k->options;
    int port;
    *card = (struct card){.magic = CARD_MAGIC, .rank = options->rank};
    bhvd_status status = socket_listen(options->listen_host, 0, &k->tcp_listener, &port, k->error);
    if (status)
        return status;
    card->port = port;
    card->uses_mpi = uses_mpi(options);
    card->streams = options->streams;
    snprintf(card->host, sizeof card->host, "%s", options->listen_host);
    snprintf(card->allreduce_path, sizeof card->allreduce_path, "%s",
             options->allreduce_path ? options->allreduce_path : "");
    snprintf(card->negotiation, sizeof card->negotiation, "%s", options->negotiation ? options->negotiation : "");
    card->negotiation_fanout = options->negotiation_fanout;
    if (!may_share(options))
        return BHVD_OK;
    if (options->host_id)
        snprintf(card->host_id, sizeof card->host_id, "%s", options->host_id);
    else
        derive_host_id(card->host_id, sizeof card->host_id);
    uint64_t random[2];
    if (getrandom(random, sizeof random, 0) != sizeof random)
        return error_set(k->error, BHVD_ERR_SYSTEM, "no random numbers: %s", strerror(errno));
    snprintf(card->local_name, sizeof card->local_name, "%016llx%016llx", (unsigned long long)random[0],
             (unsigned long long)random[1]);
    return BHVD_OK;
}

static bhvd_status exchange_cards(struct connecting *k, const struct card *mine)
{
    const struct bhvd_context_options *options = k->options;
    struct rendezvous_address address = {options->rendezvous_host, options->rendezvous_port, options->secret,
                                         options->secret_size};
    struct rendezvous_blob blob = {.size = sizeof *mine};
    struct rendezvous_blob *all = calloc((size_t)options->size, sizeof *all);
    k->cards = calloc((size_t)options->size, sizeof *k->cards);
    if (!all || !k->cards) {
        free(all);
        return error_set(k->error, BHVD_ERR_SYSTEM, "no memory for %d ranks", options->size);
    }
    memcpy(blob.data, mine, sizeof *mine);
    bhvd_status status = rendezvous_exchange(&address, options->scope, options->rank, options->size, &blob, all,
                                             k->deadline_ns, k->error);
    for (int rank = 0; rank < options->size && !status; rank++) {
        struct card *card = &k->cards[rank];
        memcpy(card, all[rank].data, sizeof *card);
        card->host[sizeof card->host - 1] = '\0';
        card->host_id[sizeof card->host_id - 1] = '\0';
        card->local_name[sizeof card->local_name - 1] = '\0';
        card->allreduce_path[sizeof card->allreduce_path - 1] = '\0';
        card->negotiation[sizeof card->negotiation - 1] = '\0';
        if (all[rank].size != sizeof *card || card->magic != CARD_MAGIC || card->rank != rank || card->streams < 0 ||
            card->streams > LINK_STREAMS_MAX)
            status = error_set(k->error, BHVD_ERR_MISMATCH,
                               "rank %d runs another version of bagua_hvd or another byte order", rank);
        else if (strcmp(card->allreduce_path, k->cards[0].allreduce_path) != 0)
            status = error_set(k->error, BHVD_ERR_MISMATCH,
                               "BAGUA_HVD_ALLREDUCE is \"%s\" on rank 0 but \"%s\" on rank %d: give all ranks the same",
                               k->cards[0].allreduce_path, card->allreduce_path, rank);
        else if (strcmp(card->negotiation, k->cards[0].negotiation) != 0 ||
                 card->negotiation_fanout != k->cards[0].negotiation_fanout)
            status = error_set(k->error, BHVD_ERR_MISMATCH,
                               "BAGUA_HVD_NEGOTIATION is \"%s\" and BAGUA_HVD_NEGOTIATION_FANOUT %d on rank 0 but \"%s\" "
                               "and %d on rank %d: give all ranks the same", k->cards[0].negotiation,
                               k->cards[0].negotiation_fanout, card->negotiation, card->negotiation_fanout, rank);
        else if (card->uses_mpi != k->cards[0].uses_mpi)
            status = error_set(k->error, BHVD_ERR_MISMATCH,
                               "transport \"mpi\" is used by rank %d but not by rank %d: give all ranks the same "
                               "BAGUA_HVD_TRANSPORT", card->uses_mpi ? rank : 0, card->uses_mpi ? 0 : rank);
    }
    free(all);
    return status;
}

// Equal on all ranks, since all have the same cards.
static void count_hosts(const struct connecting *k)
{
    int hosts = 0;
    for (int rank = 0; rank < k->c->size; rank++) {
        int first = 0;
        while (first < rank && !connecting_share_memory(k, rank, first))
            first++;
        k->c->host_of[rank] = first < rank ? k->c->host_of[first] : hosts++;
    }
}

// ---------------------------------------------------------------------------------------------------- all connections

// As many as both ranks ask for; 0: neither asks, and the higher rank decides when it has connected its control channel.
static int asked_streams(const struct connecting *k, int rank)
{
    int mine = k->cards[k->c->rank].streams, theirs = k->cards[rank].streams;
    return mine && (!theirs || mine < theirs) ? mine : theirs;
}

// MPI needs none: it finds the network's own way to several.
static int socket_streams(const struct connecting *k, int rank)
{
    return uses_mpi(k->options) ? 0 : k->c->links[rank].stream_count;
}

// What the kernel lets one connection have under way (4 MB mostly) fills a link of a Gbit/s up to 30 ms; and what is lost costs one of
// several connections less of its speed.
static int streams_for(int64_t round_trip_ns) { return round_trip_ns >= FAR_NS ? FAR_STREAMS : 1; }

static struct channel *channel_of(struct link *link, uint32_t kind)
{
    return kind == CHANNEL_CONTROL ? &link->control : &link->streams[kind - CHANNEL_STREAM].channel;
}

static void use_socket(struct link *link, uint32_t kind, int fd)
{
    *channel_of(link, kind) = (struct channel){.ops = &channel_tcp_ops, .fd = fd};
}

// Puts before the error which rank it is about.
static bhvd_status name_rank(struct connecting *k, int rank, bhvd_status status)
{
    struct bhvd_error why = *k->error;
    return error_set(k->error, status, "no connection to rank %d: %.900s", rank, why.message);
}

// One attempt at a connection that the other side welcomes.
static bhvd_status try_connect(struct connecting *k, int rank, uint32_t kind, int fd)
{
    bhvd_status status = auth_handshake(fd, AUTH_CONNECTED, k->options->secret, k->options->secret_size, k->deadline_ns,
                                        k->error);
    if (status)
        return name_rank(k, rank, status);
    if (kind == CHANNEL_CONTROL && !uses_mpi(k->options)) {
        struct link *link = &k->c->links[rank];
        const int asked = asked_streams(k, rank);
        link->round_trip_ns = socket_round_trip_ns(fd);
        link->stream_count = asked ? asked : streams_for(link->round_trip_ns);
    }
    struct hello hello = {HELLO_MAGIC, k->c->rank, kind, (uint32_t)k->c->links[rank].stream_count};
    unsigned char answer;
    status = socket_write_full(fd, &hello, sizeof hello, k->deadline_ns);
    if (!status && kind == CHANNEL_LOCAL)
        status = local_join(k, rank, fd, k->deadline_ns);
    else if (!status)
        status = socket_read_full(fd, &answer, sizeof answer, k->deadline_ns);
    if (status && !k->error->status)
        error_set(k->error, status, "the connection to rank %d broke while it was made", rank);
    return status;
}

static bhvd_status connect_to(struct connecting *k, int rank, uint32_t kind)
{
    const struct card *card = &k->cards[rank];
    for (;;) {
        int fd = -1;
        bhvd_status status = kind == CHANNEL_LOCAL
                                 ? local_connect(k, rank, &fd)
                                 : socket_connect(card->host, card->port, k->deadline_ns, &fd, k->error);
        bool no_route = kind != CHANNEL_LOCAL && status == BHVD_ERR_PEER_LOST;
        if (no_route && clock_remaining_ms(k->deadline_ns) != 0) {
            poll(NULL, 0, RETRY_MS);    // the network may be a moment behind the job
            continue;
        }
        if (status)
            return name_rank(k, rank, status);
        error_clear(k->error);          // of the attempt before
        status = try_connect(k, rank, kind, fd);
        if (!status && kind != CHANNEL_LOCAL)
            use_socket(&k->c->links[rank], kind, fd);
        if (!status)
            return BHVD_OK;
        close(fd);
        // A rank overrun by strangers may have hung up on this one among them, which comes again.
        if (status != BHVD_ERR_PEER_LOST || clock_remaining_ms(k->deadline_ns) == 0)
            return status;
        poll(NULL, 0, RETRY_MS);
    }
}

static bool is_connected(struct link *link, uint32_t kind)
{
    return kind == CHANNEL_LOCAL ? link->liveness_fd >= 0 : channel_of(link, kind)->fd >= 0;
}

// A connection of a rank that knows the secret. False: it is not expected.
static bool welcome(struct connecting *k, const struct hello *hello, int fd, bool local)
{
    if (hello->magic != HELLO_MAGIC || hello->rank <= k->c->rank || hello->rank >= k->c->size ||
        (hello->channel == CHANNEL_LOCAL) != local || local != connecting_shares_memory(k, hello->rank))
        return false;
    struct link *link = &k->c->links[hello->rank];
    const int asked = asked_streams(k, hello->rank);
    if (hello->channel == CHANNEL_CONTROL && !uses_mpi(k->options)) {
        if (hello->streams < 1 || hello->streams > LINK_STREAMS_MAX || (asked && hello->streams != (uint32_t)asked))
            return false;
        link->stream_count = (int)hello->streams;
        link->round_trip_ns = socket_round_trip_ns(fd);
    }
    if (hello->channel >= CHANNEL_STREAM && (!is_connected(link, CHANNEL_CONTROL) ||
                                             hello->channel - CHANNEL_STREAM >= (uint32_t)socket_streams(k, hello->rank)))
        return false;
    if (is_connected(link, hello->channel))
        return false;
    if (local)
        return local_join(k, hello->rank, fd, clock_deadline_ns(HANDSHAKE_MS)) == BHVD_OK;
    // Whoever hears nothing comes again.
    const unsigned char answer = 1;
    if (socket_write_full(fd, &answer, sizeof answer, clock_deadline_ns(HANDSHAKE_MS)))
        return false;
    use_socket(link, hello->channel, fd);
    return true;
}

static bool is_complete(struct connecting *k, int rank)
{
    struct link *link = &k->c->links[rank];
    if (connecting_shares_memory(k, rank))
        return is_connected(link, CHANNEL_LOCAL);
    bool complete = is_connected(link, CHANNEL_CONTROL);
    for (int i = 0; i < socket_streams(k, rank); i++)
        complete = complete && is_connected(link, CHANNEL_STREAM + (uint32_t)i);
    return complete;
}

static int first_missing(struct connecting *k)
{
    for (int rank = k->c->rank + 1; rank < k->c->size; rank++) {
        if (!is_complete(k, rank))
            return rank;
    }
    return -1;
}

static bhvd_status accept_higher(struct connecting *k)
{
    const struct greeter_options options = {{k->tcp_listener, k->local_listener}, k->options->secret,
                                            k->options->secret_size, sizeof(struct hello)};
    struct greeter *greeter = greeter_create(&options);
    if (!greeter)
        return error_set(k->error, BHVD_ERR_SYSTEM, "no memory to accept connections");
    bhvd_status status = BHVD_OK;
    for (int missing; !status && (missing = first_missing(k)) >= 0;) {
        struct hello hello;
        int fd, listener;
        status = greeter_next(greeter, &hello, &fd, &listener, k->deadline_ns);
        if (status == BHVD_ERR_SYSTEM)
            error_set(k->error, status, "the connections of the other ranks cannot be accepted: %s; raise the limit of "
                      "open files (ulimit -n)", strerror(errno));
        else if (status)
            error_set(k->error, status, "rank %d did not connect within %.0f s", missing,
                      k->options->start_timeout_ms / 1000.0);
        else if (!welcome(k, &hello, fd, listener == 1))
            close(fd);
    }
    greeter_destroy(greeter);
    return status;
}

static bhvd_status connect_all(struct connecting *k)
{
    struct connections *c = k->c;
    bhvd_status status = BHVD_OK;
    // The memory comes from the lowest rank of the host, which is also the first that the others connect to.
    if (c->local_index == 0)
        status = local_make_memory(k);
    for (int rank = 0; rank < c->rank && !status; rank++) {
        if (connecting_shares_memory(k, rank)) {
            status = connect_to(k, rank, CHANNEL_LOCAL);
        } else {
            status = connect_to(k, rank, CHANNEL_CONTROL);
            for (int i = 0; i < socket_streams(k, rank) && !status; i++)
                status = connect_to(k, rank, CHANNEL_STREAM + (uint32_t)i);
        }
    }
    return status ? status : accept_higher(k);
}

static void close_fd(int fd)
{
    if (fd >= 0)
        close(fd);
}

static bhvd_status connect_network(struct connections *c, const struct bhvd_context_options *options,
                                   struct bhvd_error *error)
{
    struct connecting k = {
        .c = c, .options = options, .tcp_listener = -1, .local_listener = -1, .memory_fd = -1,
        .deadline_ns = clock_deadline_ns(options->start_timeout_ms), .error = error};
    struct card mine;
    bhvd_status status = fill_card(&k, &mine);
    if (!status && may_share(options))
        status = local_listen(&k, mine.local_name);
    if (!status)
        status = exchange_cards(&k, &mine);
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
        status = connect_all(&k);
    if (!status && uses_mpi(options))
        status = mpi_connect(c, k.deadline_ns, error);
    free(k.cards);
    close_fd(k.tcp_listener);
    close_fd(k.local_listener);
    close_fd(k.memory_fd);
    return status;
}

static bhvd_status connect_alone(struct connections *c, struct bhvd_error *error)
{
    c->local_size = 1;
    struct connecting k = {.c = c, .memory_fd = -1, .error = error};
    bhvd_status status = local_make_memory(&k);
    close_fd(k.memory_fd);
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
    if (options->streams < 0 || options->streams > LINK_STREAMS_MAX)
        return error_set(error, BHVD_ERR_ARGUMENT, "%d streams to each rank: 1 to %d are possible", options->streams,
                         LINK_STREAMS_MAX);
    if (options->size < 1 || options->rank < 0 || options->rank >= options->size)
        return error_set(error, BHVD_ERR_ARGUMENT, "rank %d of %d does not exist", options->rank, options->size);
    if (options->size > 1 && strcmp(options->transport, "inproc") != 0 &&
        (!options->rendezvous_host || !options->listen_host || !options->scope))
        return error_set(error, BHVD_ERR_ARGUMENT, "a job of %d ranks needs a rendezvous; start it with baguarun",
                         options->size);
    if (options->size > 1 && uses_mpi(options))
        return mpi_check(options->rank, options->size, error);
    return BHVD_OK;
}

bhvd_status connections_init(struct connections *c, const struct bhvd_context_options *options,
                             struct bhvd_error *error)
{
    *c = (struct connections){.rank = options->rank, .size = options->size, .bell = {.fd = -1}, .watch = {.fd = -1}};
    error_clear(error);
    bhvd_status status = check_options(options, error);
    if (status)
        return status;
    c->links = calloc((size_t)c->size, sizeof *c->links);
    c->host_of = calloc((size_t)c->size, sizeof *c->host_of);       // one host, unless the cards say otherwise
    if (!c->links || !c->host_of) {
        free(c->links);
        free(c->host_of);
        return error_set(error, BHVD_ERR_SYSTEM, "no memory for %d ranks", c->size);
    }
    for (int rank = 0; rank < c->size; rank++)
        link_init(&c->links[rank], rank, &c->started);
    bool inproc = strcmp(options->transport, "inproc") == 0;
    if (!inproc)
        c->bell.fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    if (!inproc && c->bell.fd < 0)
        status = error_set(error, BHVD_ERR_SYSTEM, "cannot make an eventfd: %s", strerror(errno));
    else
        status = inproc         ? inproc_connect(c, options->inproc_world, error)
                 : c->size == 1 ? connect_alone(c, error)
                                : connect_network(c, options, error);
    if (!status && watch_init(&c->watch, c->links, c->size, c->rank))
        status = error_set(error, BHVD_ERR_SYSTEM, "the connections to %d ranks cannot be watched: %s", c->size, strerror(errno));
    if (status)
        connections_fini(c);
    return status;
}

void connections_fini(struct connections *c)
{
    mpi_disconnect(c);
    watch_fini(&c->watch);
    for (int rank = 0; rank < c->size && c->links; rank++)
        link_fini(&c->links[rank]);
    free(c->links);
    free(c->host_of);
    close_fd(c->bell.fd);
    if (c->owns_host_memory)
        munmap(c->host.base, c->host.size);
    *c = (struct connections){.bell = {.fd = -1}, .watch = {.fd = -1}};
}
