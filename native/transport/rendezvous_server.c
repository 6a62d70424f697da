// Who asks: connections. What they wait for is in scopes.h.
// The server is one thread around poll(). The handshake server lets in who has proven the secret; from there a connection passes
// through the stages below and waits in none of them for longer than its deadline, so the thread itself never waits for one
// peer. All of the server's state but its port, wake_fd, closing and the ranks that ended belongs to that thread.
#include <errno.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/status.h"
#include "base/thread.h"
#include "transport/handshake_server.h"
#include "transport/scopes.h"
#include "transport/socket.h"

enum {
    REQUEST_TIME_MS = 5000,     // from the proof to its complete request
    REPLY_TIME_MS = 30000,      // without a byte of the reply being taken
    WRITE_BATCH = 65536,        // bytes of one reply at a time; then the others have their turn
};

enum stage { HEAD, BODY, WAITING, REPLYING };

struct connection {
    int fd;                     // -1: dropped, to be freed at the end of the turn
    enum stage stage;
    int64_t deadline_ns;        // dropped then; WAITING: answered then
    struct bytes in;            // the stage's message as far as it has come: `wanted` bytes in the end
    size_t wanted;
    struct guest guest;         // its request from BODY on; in a scope: WAITING
    struct reply *reply;        // REPLYING
    size_t reply_sent;
};

struct bhvd_rendezvous {
    int listen_fd, wake_fd, port;
    _Atomic bool closing;
    unsigned char *secret;
    size_t secret_size;
    pthread_t thread;

    struct handshake_server *handshakes;
    struct connection **connections;
    struct pollfd *polls;               // wake_fd, one per connection, then the handshake server's
    size_t count, capacity;
    struct scopes scopes;
};

static void connection_drop(struct connection *c)
{
    if (c->fd < 0)
        return;
    close(c->fd);
    c->fd = -1;
    scopes_leave(&c->guest);
    bytes_fini(&c->in);
    reply_drop(c->reply);
    c->reply = NULL;
}

static void connection_write(struct connection *c)
{
    if (c->fd < 0 || !c->reply)
        return;
    const struct bytes *b = &c->reply->bytes;
    size_t moved, left = b->size - c->reply_sent, batch = left < WRITE_BATCH ? left : WRITE_BATCH;
    bhvd_status status = socket_write(c->fd, b->data + c->reply_sent, batch, &moved);
    c->reply_sent += moved;
    if (moved > 0)
        c->deadline_ns = clock_deadline_ns(REPLY_TIME_MS);
    if (status || c->reply_sent == b->size)
        connection_drop(c);
}

// The connection no longer waits. reply stays the caller's to drop.
static void connection_answer(struct guest *guest, struct reply *reply)
{
    struct connection *c = (struct connection *)(void *)((char *)guest - offsetof(struct connection, guest));
    c->stage = REPLYING;
    c->deadline_ns = clock_deadline_ns(REPLY_TIME_MS);
    bytes_fini(&c->in);
    if (!reply || reply->bytes.failed) {        // no memory for the reply: the client reports the lost connection
        connection_drop(c);
        return;
    }
    reply->holders++;
    c->reply = reply;
    connection_write(c);
}

static void connection_expect(struct connection *c, enum stage stage, size_t wanted)
{
    c->stage = stage;
    c->in.size = 0;
    c->wanted = wanted;
}

// The stage's message is complete.
static void connection_advance(struct bhvd_rendezvous *server, struct connection *c)
{
    struct bytes_reader reader = {c->in.data, c->in.data + c->in.size, false};
    switch (c->stage) {
    case HEAD:
        if (!rendezvous_request_take(&reader, &c->guest.request))
            goto drop;
        connection_expect(c, BODY, c->guest.request.scope_size + c->guest.request.blob_size);
        return;
    case BODY:
        if (memchr(c->in.data, '\0', c->guest.request.scope_size))
            goto drop;
        c->stage = WAITING;
        c->deadline_ns = c->guest.request.patience_ms == UINT32_MAX
                             ? CLOCK_NEVER : clock_now_ns() + (int64_t)c->guest.request.patience_ms * 1000000;
        scopes_join(&server->scopes, &c->guest, c->in.data);
        return;
    case WAITING: case REPLYING:
        return;
    }
drop:
    connection_drop(c);
}

static void connection_read(struct bhvd_rendezvous *server, struct connection *c)
{
    unsigned char buffer[REQUEST_BODY_MAX];
    size_t moved;
    while (c->fd >= 0 && c->stage < WAITING) {
        if (socket_read(c->fd, buffer, c->wanted - c->in.size, &moved)) {
            connection_drop(c);
            return;
        }
        if (moved == 0)
            return;
        bytes_put(&c->in, buffer, moved);
        if (c->in.failed)
            connection_drop(c);
        else if (c->in.size == c->wanted)
            connection_advance(server, c);
    }
    // Who waits has said everything: what comes is the end of the connection, or nonsense.
    if (c->fd >= 0 && c->stage == WAITING && (socket_read(c->fd, buffer, 1, &moved) || moved > 0))
        connection_drop(c);
}

static void connection_expire(struct connection *c)
{
    if (c->stage == WAITING)
        scopes_give_up(&c->guest);
    else
        connection_drop(c);
}

static bool reserve_connection(struct bhvd_rendezvous *server)
{
    if (server->count < server->capacity)
        return true;
    size_t capacity = server->capacity ? 2 * server->capacity : 64;
    void *connections = realloc(server->connections, capacity * sizeof server->connections[0]);
    if (!connections)
        return false;
    server->connections = connections;
    void *polls = realloc(server->polls, (1 + capacity + HANDSHAKE_POLLS_MAX) * sizeof server->polls[0]);
    if (!polls)
        return false;
    server->polls = polls;
    server->capacity = capacity;
    return true;
}

// polls: the handshake server's are from there on.
static void let_in(struct bhvd_rendezvous *server, size_t polls)
{
    struct authenticated peer;
    while (!handshake_server_next(server->handshakes, server->polls + polls, &peer)) {
        struct connection *c = reserve_connection(server) ? calloc(1, sizeof *c) : NULL;
        if (!c) {
            close(peer.fd);
            continue;
        }
        c->fd = peer.fd;
        c->deadline_ns = clock_deadline_ns(REQUEST_TIME_MS);
        connection_expect(c, HEAD, REQUEST_HEAD_SIZE);
        server->connections[server->count++] = c;
    }
}

static void free_dropped(struct bhvd_rendezvous *server)
{
    size_t kept = 0;
    for (size_t i = 0; i < server->count; i++) {
        if (server->connections[i]->fd < 0)
            free(server->connections[i]);
        else
            server->connections[kept++] = server->connections[i];
    }
    server->count = kept;
}

// Sleeps until something is to be done; the events are in server->polls.
static void wait_for_events(struct bhvd_rendezvous *server)
{
    int64_t wake_ns = CLOCK_NEVER;
    server->polls[0] = (struct pollfd){.fd = server->wake_fd, .events = POLLIN};
    for (size_t i = 0; i < server->count; i++) {
        const struct connection *c = server->connections[i];
        short events = (c->stage <= WAITING ? POLLIN : 0) | (c->reply ? POLLOUT : 0);
        server->polls[1 + i] = (struct pollfd){.fd = c->fd, .events = events};
        if (c->deadline_ns < wake_ns)
            wake_ns = c->deadline_ns;
    }
    const int handshake_servers = handshake_server_poll(server->handshakes, server->polls + 1 + server->count, &wake_ns);
    socket_poll(server->polls, 1 + server->count + (size_t)handshake_servers, wake_ns);
}

static void *serve(void *arg)
{
    struct bhvd_rendezvous *server = arg;
    for (;;) {
        wait_for_events(server);
        if (server->polls[0].revents) {
            eventfd_t count;
            eventfd_read(server->wake_fd, &count);
        }
        if (server->closing)            // looked at after the reading, which may have taken what told of it
            return NULL;
        size_t polled = server->count;
        for (size_t i = 0; i < polled; i++) {
            struct connection *c = server->connections[i];
            if (server->polls[1 + i].revents) {     // a failure too: writing or reading then finds it
                connection_write(c);
                connection_read(server, c);
            }
        }
        int64_t now = clock_now_ns();
        for (size_t i = 0; i < polled; i++)
            if (server->connections[i]->fd >= 0 && server->connections[i]->deadline_ns <= now)
                connection_expire(server->connections[i]);
        let_in(server, 1 + polled);
        scopes_answer_hopeless(&server->scopes);
        free_dropped(server);
    }
}

// The thread has ended, or never began.
static void server_free(struct bhvd_rendezvous *server)
{
    for (size_t i = 0; i < server->count; i++)
        connection_drop(server->connections[i]);
    free_dropped(server);
    scopes_fini(&server->scopes);
    handshake_server_destroy(server->handshakes);
    free(server->connections);
    free(server->polls);
    if (server->listen_fd >= 0)
        close(server->listen_fd);
    if (server->wake_fd >= 0)
        close(server->wake_fd);
    if (server->secret)
        explicit_bzero(server->secret, server->secret_size);
    free(server->secret);
    free(server);
}

bhvd_status bhvd_rendezvous_create(const char *host, int port, int last_port, const void *secret, size_t secret_size,
                                   bhvd_rendezvous **out, struct bhvd_error *error)
{
    *out = NULL;
    error_clear(error);
    if (secret_size == 0)
        return error_set(error, BHVD_ERR_ARGUMENT, "the job's secret is empty, so anybody could join the job: set "
                         "_HOROVOD_SECRET_KEY to random bytes");
    bhvd_status status = BHVD_ERR_SYSTEM;
    struct bhvd_rendezvous *server = calloc(1, sizeof *server);
    if (!server)
        return error_set(error, status, "out of memory for the rendezvous server");
    server->listen_fd = server->wake_fd = -1;
    server->scopes.answer = connection_answer;
    server->secret = malloc(secret_size);
    if (!server->secret || !reserve_connection(server)) {
        error_set(error, status, "out of memory for the rendezvous server");
        goto fail;
    }
    memcpy(server->secret, secret, secret_size);
    server->secret_size = secret_size;
    server->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (server->wake_fd < 0) {
        error_set(error, status, "cannot make an eventfd for the rendezvous server: %m");
        goto fail;
    }
    status = socket_listen(host, port, last_port, &server->listen_fd, &server->port, error);
    if (status)
        goto fail;

    server->handshakes = handshake_server_create(&(struct handshake_server_options){
        .listeners = {server->listen_fd, -1}, .bindings = {{AUTH_RENDEZVOUS, AUTH_NO_RANK, AUTH_NO_RANK, server->port}},
        .secret = server->secret, .secret_size = secret_size});
    if (!server->handshakes) {
        status = error_set(error, BHVD_ERR_SYSTEM, "out of memory for the rendezvous server");
        goto fail;
    }
    int failure = thread_create(&server->thread, serve, server);
    if (failure) {
        errno = failure;
        status = error_set(error, BHVD_ERR_SYSTEM, "cannot start the rendezvous server's thread: %m");
        goto fail;
    }
    *out = server;
    return BHVD_OK;

fail:
    server_free(server);
    return status;
}

int bhvd_rendezvous_port(const bhvd_rendezvous *rendezvous) { return rendezvous->port; }

void bhvd_rendezvous_rank_ended(bhvd_rendezvous *rendezvous, const char *scope, int rank, int exit_code)
{
    scopes_rank_ended(&rendezvous->scopes, scope, rank, exit_code);
    eventfd_write(rendezvous->wake_fd, 1);
}

void bhvd_rendezvous_destroy(bhvd_rendezvous *rendezvous)
{
    if (!rendezvous)
        return;
    rendezvous->closing = true;
    eventfd_write(rendezvous->wake_fd, 1);
    pthread_join(rendezvous->thread, NULL);
    server_free(rendezvous);
}
