// The server is one thread around poll(). The handshake server admits a peer that has proven the secret and sent the head of its
// request; then its connection passes through the stages below and stays in none of them beyond its deadline, so the thread
// itself never waits for one peer. The thread owns all of the server's state except its port, wake_fd, closing and the ranks that
// ended.
#include <errno.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>

#include "base/clock.h"
#include "base/status.h"
#include "base/thread.h"
#include "transport/handshake_server.h"
#include "transport/rendezvous_wire.h"
#include "transport/socket.h"
#include "transport/transport.h"

enum {
    REQUEST_TIME_MS = 5000,     // from the head of a request to its end
    REPLY_TIME_MS = 30000,      // without progress in sending the reply
    WRITE_BATCH = 65536,        // bytes of one reply at a time, before other connections are served
};

// Shared by all ranks of a scope, since it may have many megabytes.
struct reply {
    int holders;
    struct bytes bytes;
};

enum stage { BODY, WAITING, REPLYING };

struct connection {
    int fd;                     // -1: dropped, will be freed at the end of the loop iteration
    enum stage stage;
    int64_t deadline_ns;        // then it is dropped; WAITING: then it is answered
    struct rendezvous_request request;
    struct scope *scope;        // WAITING: its scope
    struct reply *reply;        // REPLYING
    size_t moved;               // bytes of the body, then of the reply
    unsigned char body[];       // the scope's name, and the blob
};

// The ranks that wait under one name; freed with the last of them.
struct scope {
    struct bhvd_rendezvous *server;
    struct scope *next;
    char name[RENDEZVOUS_SCOPE_MAX + 1];
    uint32_t size, arrived;
    struct connection *ranks[];         // NULL: not arrived
};

struct ended_rank {
    struct ended_rank *next;
    uint32_t rank;
    int exit_code;
    char scope[RENDEZVOUS_SCOPE_MAX + 1];       // the scope in which the process had this rank; "": any
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
    struct scope *scopes;
    struct ended_rank *_Atomic ended;   // only grows; latest first
};

static struct reply *reply_create(bhvd_status status, struct bytes *body)
{
    struct reply *reply = calloc(1, sizeof *reply);
    if (reply) {
        bytes_put_u32(&reply->bytes, REPLY_MAGIC);
        bytes_put_u32(&reply->bytes, (uint32_t)status);
        bytes_put_u32(&reply->bytes, (uint32_t)body->size);
        bytes_put(&reply->bytes, body->data, body->size);
        reply->bytes.failed |= body->failed;
        reply->holders = 1;
    }
    bytes_fini(body);
    return reply;
}

static struct reply *reply_sentence(const struct bhvd_error *error)
{
    struct bytes body = {0};
    bytes_put(&body, error->message, strlen(error->message));
    return reply_create(error->status, &body);
}

static void reply_release(struct reply *reply)
{
    if (reply && --reply->holders == 0) {
        bytes_fini(&reply->bytes);
        free(reply);
    }
}

// --------------------------------------------------------------------------------------------------------- connections

static void scope_destroy(struct scope *scope)
{
    struct scope **link = &scope->server->scopes;
    while (*link != scope)
        link = &(*link)->next;
    *link = scope->next;
    free(scope);
}

static void scope_leave(struct connection *c)
{
    struct scope *scope = c->scope;
    if (!scope)
        return;
    c->scope = NULL;
    scope->ranks[c->request.rank] = NULL;
    if (--scope->arrived == 0)
        scope_destroy(scope);
}

static void connection_destroy(struct connection *c)
{
    if (c->fd < 0)
        return;
    fd_close(&c->fd);
    scope_leave(c);
    reply_release(c->reply);
    c->reply = NULL;
}

static void connection_write(struct connection *c)
{
    if (c->fd < 0 || !c->reply)
        return;
    const struct bytes *b = &c->reply->bytes;
    size_t moved, left = b->size - c->moved, batch = left < WRITE_BATCH ? left : WRITE_BATCH;
    bhvd_status status = socket_write(c->fd, b->data + c->moved, batch, &moved);
    c->moved += moved;
    if (moved > 0)
        c->deadline_ns = clock_deadline_ns(REPLY_TIME_MS);
    if (status || c->moved == b->size)
        connection_destroy(c);
}

// Ends its wait. The caller still drops reply; NULL: no memory for one, and the client reports the lost connection.
static void connection_answer(struct connection *c, struct reply *reply)
{
    c->scope = NULL;
    c->stage = REPLYING;
    c->deadline_ns = clock_deadline_ns(REPLY_TIME_MS);
    if (!reply || reply->bytes.failed) {
        connection_destroy(c);
        return;
    }
    reply->holders++;
    c->reply = reply;
    c->moved = 0;
    connection_write(c);
}

// -------------------------------------------------------------------------------------------------------------- scopes

static void scope_answer(struct scope *scope, struct reply *reply)
{
    for (uint32_t i = 0; i < scope->size; i++) {
        if (scope->ranks[i])
            connection_answer(scope->ranks[i], reply);
    }
    scope_destroy(scope);
    reply_release(reply);
}

static struct reply *scope_all_blobs(const struct scope *scope)
{
    struct bytes body = {0};
    for (uint32_t i = 0; i < scope->size; i++) {
        const struct connection *c = scope->ranks[i];
        bytes_put_u32(&body, c->request.blob_size);
        bytes_put(&body, c->body + c->request.scope_size, c->request.blob_size);
    }
    return reply_create(BHVD_OK, &body);
}

static bhvd_status scope_missing_ranks(const struct scope *scope, uint32_t limit_ms, struct bhvd_error *error)
{
    enum { NAMED_MAX = 8 };
    char names[NAMED_MAX * 16] = "";
    uint32_t missing = scope->size - scope->arrived, named = 0;
    size_t length = 0;
    for (uint32_t i = 0; i < scope->size && named < NAMED_MAX; i++)
        if (!scope->ranks[i])
            length += (size_t)snprintf(names + length, sizeof names - length, "%s%u", named++ ? ", " : "", i);
    if (missing > named)
        snprintf(names + length, sizeof names - length, " and %u more", missing - named);
    return error_set(error, BHVD_ERR_TIMEOUT, "rank%s %s of %u did not arrive within %s (HOROVOD_START_TIMEOUT; scope %s)",
                     missing == 1 ? "" : "s", names, scope->size, rendezvous_duration(limit_ms).text, scope->name);
}

static struct scope *scope_find_or_create(struct bhvd_rendezvous *server, const char *name, uint32_t size)
{
    for (struct scope *s = server->scopes; s; s = s->next)
        if (strcmp(s->name, name) == 0)
            return s;
    struct scope *s = calloc(1, sizeof *s + size * sizeof s->ranks[0]);
    if (s) {
        snprintf(s->name, sizeof s->name, "%s", name);
        s->server = server;
        s->size = size;
        s->next = server->scopes;
        server->scopes = s;
    }
    return s;
}

static bhvd_status scope_check(const struct scope *scope, const struct rendezvous_request *r, struct bhvd_error *error)
{
    if (r->size != scope->size)
        return error_set(error, BHVD_ERR_MISMATCH, "rank %u counts %u ranks in the job, others count %u (scope %s)",
                         r->rank, r->size, scope->size, scope->name);
    if (r->rank >= scope->size)
        return error_set(error, BHVD_ERR_MISMATCH, "a process says it is rank %u of %u; ranks are 0 to %u (scope %s)",
                         r->rank, r->size, r->size - 1, scope->name);
    if (scope->ranks[r->rank])
        return error_set(error, BHVD_ERR_MISMATCH, "two processes say they are rank %u of %u (scope %s): one that a rank starts "
                         "and that calls init() itself must not inherit HOROVOD_RANK and HOROVOD_SIZE", r->rank, r->size, scope->name);
    return BHVD_OK;
}

// Handles a complete request. The last rank of a scope, or an invalid one, causes the reply to all.
static void scope_join(struct bhvd_rendezvous *server, struct connection *c)
{
    const struct rendezvous_request *r = &c->request;
    char name[RENDEZVOUS_SCOPE_MAX + 1] = {0};
    memcpy(name, c->body, r->scope_size);
    struct scope *scope = scope_find_or_create(server, name, r->size);
    struct bhvd_error error;
    if (!scope) {
        connection_answer(c, NULL);
    } else if (scope_check(scope, r, &error)) {
        struct reply *reply = reply_sentence(&error);
        connection_answer(c, reply);
        scope_answer(scope, reply);
    } else {
        c->scope = scope;
        scope->ranks[r->rank] = c;
        if (++scope->arrived == scope->size)
            scope_answer(scope, scope_all_blobs(scope));
    }
}

// The first rank to end among those that ended without coming to the scope: the others may have ended because of it.
static const struct ended_rank *first_missing(const struct scope *scope)
{
    const struct ended_rank *first = NULL;
    for (const struct ended_rank *ended = atomic_load(&scope->server->ended); ended; ended = ended->next)
        if (ended->rank < scope->size && !scope->ranks[ended->rank] && (!*ended->scope || strcmp(ended->scope, scope->name) == 0))
            first = ended;
    return first;
}

// Answers scopes that wait for a rank whose process has ended. Called after every event that may create one.
static void answer_hopeless(struct bhvd_rendezvous *server)
{
    for (struct scope *scope = server->scopes, *next; scope; scope = next) {
        next = scope->next;
        const struct ended_rank *missing = first_missing(scope);
        if (!missing)
            continue;
        struct bhvd_error error;
        error_set(&error, BHVD_ERR_PEER_LOST, "rank %u of %u has ended, with exit code %d, and did not come to init() "
                  "(scope %s)", missing->rank, scope->size, missing->exit_code, scope->name);
        scope_answer(scope, reply_sentence(&error));
    }
}

// ---------------------------------------------------------------------------------------------------------- main loop

static void connection_read(struct bhvd_rendezvous *server, struct connection *c)
{
    const struct rendezvous_request *r = &c->request;
    unsigned char nonsense;
    size_t moved;
    if (c->fd >= 0 && c->stage == BODY) {
        bhvd_status status = socket_read_part(c->fd, c->body, r->scope_size + r->blob_size, &c->moved);
        if (status == BHVD_IN_PROGRESS)
            return;
        if (status || memchr(c->body, '\0', r->scope_size)) {
            connection_destroy(c);
            return;
        }
        c->stage = WAITING;
        c->deadline_ns = r->respond_within_ms == UINT32_MAX ? CLOCK_NEVER : clock_now_ns() + clock_ms_ns(r->respond_within_ms);
        scope_join(server, c);
    }
    // A waiting peer has sent everything: only the end of the connection or garbage can follow.
    if (c->fd >= 0 && c->stage == WAITING && (socket_read(c->fd, &nonsense, 1, &moved) || moved > 0))
        connection_destroy(c);
}

// A rank that gives up ends its scope: the others would wait in vain and then report that rank as missing.
static void connection_expire(struct connection *c)
{
    struct bhvd_error error;
    if (c->stage != WAITING) {
        connection_destroy(c);
        return;
    }
    scope_missing_ranks(c->scope, c->request.limit_ms, &error);
    scope_answer(c->scope, reply_sentence(&error));
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

// polls: index of the handshake server's first entry.
static void let_in(struct bhvd_rendezvous *server, size_t polls)
{
    struct authenticated peer;
    while (!handshake_server_next(server->handshakes, server->polls + polls, &peer)) {
        struct bytes_reader head = {peer.name, peer.name + REQUEST_HEAD_SIZE, false};
        struct rendezvous_request request;
        struct connection *c = NULL;
        if (rendezvous_request_take(&head, &request) && reserve_connection(server))
            c = malloc(sizeof *c + request.scope_size + request.blob_size);
        if (!c) {
            fd_close(&peer.fd);
            continue;
        }
        *c = (struct connection){.fd = peer.fd, .deadline_ns = clock_deadline_ns(REQUEST_TIME_MS), .request = request};
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

// Sleeps until there is work; the events are in server->polls.
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
        if (server->polls[0].revents)
            eventfd_read(server->wake_fd, &(eventfd_t){0});
        if (server->closing)            // checked after the read, which may have consumed its wake-up
            return NULL;
        size_t polled = server->count;
        for (size_t i = 0; i < polled; i++) {
            struct connection *c = server->connections[i];
            if (server->polls[1 + i].revents) {     // also on a failure, which the write or read then reports
                connection_write(c);
                connection_read(server, c);
            }
        }
        int64_t now = clock_now_ns();
        for (size_t i = 0; i < polled; i++)
            if (server->connections[i]->fd >= 0 && server->connections[i]->deadline_ns <= now)
                connection_expire(server->connections[i]);
        let_in(server, 1 + polled);
        answer_hopeless(server);
        free_dropped(server);
    }
}

// The thread has ended, or was never started.
static void server_free(struct bhvd_rendezvous *server)
{
    for (size_t i = 0; i < server->count; i++)
        connection_destroy(server->connections[i]);
    free_dropped(server);
    for (struct ended_rank *ended = server->ended, *next; ended; ended = next) {
        next = ended->next;
        free(ended);
    }
    handshake_server_destroy(server->handshakes);
    free(server->connections);
    free(server->polls);
    fd_close(&server->listen_fd);
    fd_close(&server->wake_fd);
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
        .secret = server->secret, .secret_size = secret_size, .name_size = REQUEST_HEAD_SIZE});
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

void bhvd_rendezvous_rank_ended(bhvd_rendezvous *server, const char *scope, int rank, int exit_code)
{
    struct ended_rank *ended = malloc(sizeof *ended);
    if (!ended)
        return;                     // no memory: the ranks wait until their timeout
    *ended = (struct ended_rank){atomic_load(&server->ended), (uint32_t)rank, exit_code, ""};
    snprintf(ended->scope, sizeof ended->scope, "%s", scope);
    while (!atomic_compare_exchange_weak(&server->ended, &ended->next, ended)) {
    }
    eventfd_write(server->wake_fd, 1);
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
