// The wire, the server, the client, in this order.
//
// The server is one thread around poll(). A connection passes through the stages below and waits in none of them for
// longer than its deadline, so the thread itself never waits for one peer. All of the server's state but its port and
// wake_fd belongs to that thread.
#include "transport/rendezvous.h"

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "base/bytes.h"
#include "base/clock.h"
#include "base/status.h"
#include "transport/auth.h"
#include "transport/socket.h"

// ---------------------------------------------------------------------------------------------------- wire ----
//
//     both ways          the handshake (auth.h)
//     client to server   magic, rank, size, patience_ms, limit_ms, scope_size, blob_size (u32 each), scope, blob
//     server to client   magic, status, body_size (u32 each), body
//                        BHVD_OK: for each rank its blob_size (u32) and blob; else the sentence

enum {
    REQUEST_MAGIC = 0x71525642, REPLY_MAGIC = 0x70525642,       // "BVRq", "BVRp"
    REQUEST_HEAD_SIZE = 7 * 4, REPLY_HEAD_SIZE = 3 * 4,
    REQUEST_BODY_MAX = RENDEZVOUS_SCOPE_MAX + RENDEZVOUS_BLOB_MAX,
};

struct request {
    uint32_t rank, size;
    uint32_t patience_ms;       // the server answers by then, whoever is missing; UINT32_MAX: never
    uint32_t limit_ms;          // the whole time the client's user gave, for the sentence
    uint32_t scope_size, blob_size;
};

static void request_put(struct bytes *b, const struct request *r)
{
    const uint32_t words[] = {REQUEST_MAGIC, r->rank, r->size, r->patience_ms, r->limit_ms, r->scope_size, r->blob_size};
    for (size_t i = 0; i < sizeof words / sizeof words[0]; i++)
        bytes_put_u32(b, words[i]);
}

// False unless every length is within its bounds; rank may still exceed size.
static bool request_take(struct bytes_reader *reader, struct request *r)
{
    uint32_t magic = bytes_take_u32(reader);
    r->rank = bytes_take_u32(reader);
    r->size = bytes_take_u32(reader);
    r->patience_ms = bytes_take_u32(reader);
    r->limit_ms = bytes_take_u32(reader);
    r->scope_size = bytes_take_u32(reader);
    r->blob_size = bytes_take_u32(reader);
    return !reader->failed && magic == REQUEST_MAGIC && r->size >= 1 && r->size <= RENDEZVOUS_SIZE_MAX
           && r->scope_size >= 1 && r->scope_size <= RENDEZVOUS_SCOPE_MAX && r->blob_size <= RENDEZVOUS_BLOB_MAX;
}

struct duration { char text[24]; };

// 30 s, 1.5 s, 0.25 s.
static struct duration duration(int64_t ms)
{
    struct duration d;
    snprintf(d.text, sizeof d.text, ms < 10000 ? "%.2g s" : "%.0f s", (double)ms / 1000);
    return d;
}

// -------------------------------------------------------------------------------------------------- server ----

enum {
    // Strangers that may be connected at once; one more evicts the one that has waited longest. A rank needs two round
    // trips to become known, so a job of any size does not come near it for long, and an evicted rank comes again.
    STRANGERS_MAX = 256,
    REQUEST_TIME_MS = 5000,     // from the connection to its complete request
    REPLY_TIME_MS = 30000,      // without a byte of the reply being taken
    ACCEPT_PAUSE_MS = 100,      // when out of descriptors
    ACCEPT_BATCH = 64,          // then the others have their turn
};

enum stage { HELLO, PROOF, HEAD, BODY, WAITING, REPLYING };     // up to PROOF: a stranger

// One for all ranks of a scope, which may be many megabytes in all.
struct reply {
    int holders;
    struct bytes bytes;
};

struct connection {
    int fd;                     // -1: dropped, to be freed at the end of the turn
    enum stage stage;
    int64_t deadline_ns;        // dropped then; WAITING: answered then
    struct auth auth;
    struct bytes in;            // the stage's message as far as it has come: `wanted` bytes in the end
    size_t wanted;
    struct bytes out;           // of the handshake, not yet sent
    struct request request;     // from BODY on
    struct scope *scope;        // WAITING
    struct reply *reply;        // REPLYING
    size_t reply_sent;
};

// The ranks that wait under one name; lives as long as there are any.
struct scope {
    struct scope *next;
    char name[RENDEZVOUS_SCOPE_MAX + 1];
    uint32_t size, arrived;
    struct connection *ranks[];         // NULL: not here
};

struct bhvd_rendezvous {
    int listen_fd, wake_fd, port;
    unsigned char *secret;
    size_t secret_size;
    pthread_t thread;

    struct connection **connections;    // in the order they came
    struct pollfd *polls;               // wake_fd, listen_fd, then one per connection
    size_t count, capacity, stranger_count;
    struct scope *scopes;
    int64_t accept_again_ns;            // 0: accepting
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

static void reply_drop(struct reply *reply)
{
    if (reply && --reply->holders == 0) {
        bytes_fini(&reply->bytes);
        free(reply);
    }
}

static void scope_destroy(struct bhvd_rendezvous *server, struct scope *scope)
{
    struct scope **link = &server->scopes;
    while (*link != scope)
        link = &(*link)->next;
    *link = scope->next;
    free(scope);
}

static void connection_drop(struct bhvd_rendezvous *server, struct connection *c)
{
    if (c->fd < 0)
        return;
    close(c->fd);
    c->fd = -1;
    if (c->stage <= PROOF)
        server->stranger_count--;
    if (c->scope) {
        c->scope->ranks[c->request.rank] = NULL;
        if (--c->scope->arrived == 0)
            scope_destroy(server, c->scope);
        c->scope = NULL;
    }
    bytes_fini(&c->in);
    bytes_fini(&c->out);
    reply_drop(c->reply);
    c->reply = NULL;
}

static void connection_write(struct bhvd_rendezvous *server, struct connection *c)
{
    size_t moved;
    if (c->fd >= 0 && c->out.size > 0) {
        if (socket_write(c->fd, c->out.data, c->out.size, &moved)) {
            connection_drop(server, c);
            return;
        }
        bytes_shift(&c->out, moved);
    }
    while (c->fd >= 0 && c->reply) {
        const struct bytes *b = &c->reply->bytes;
        bhvd_status status = socket_write(c->fd, b->data + c->reply_sent, b->size - c->reply_sent, &moved);
        c->reply_sent += moved;
        if (status || c->reply_sent == b->size)
            connection_drop(server, c);
        else if (moved == 0)
            break;
        else
            c->deadline_ns = clock_deadline_ns(REPLY_TIME_MS);
    }
}

// The connection no longer waits. reply stays the caller's to drop.
static void connection_answer(struct bhvd_rendezvous *server, struct connection *c, struct reply *reply)
{
    c->scope = NULL;
    c->stage = REPLYING;
    c->deadline_ns = clock_deadline_ns(REPLY_TIME_MS);
    bytes_fini(&c->in);
    if (!reply || reply->bytes.failed) {        // no memory for the reply: the client reports the lost connection
        connection_drop(server, c);
        return;
    }
    reply->holders++;
    c->reply = reply;
    connection_write(server, c);
}

static void scope_answer(struct bhvd_rendezvous *server, struct scope *scope, struct reply *reply)
{
    for (uint32_t i = 0; i < scope->size; i++)
        if (scope->ranks[i])
            connection_answer(server, scope->ranks[i], reply);
    scope_destroy(server, scope);
}

static struct reply *scope_all_blobs(const struct scope *scope)
{
    struct bytes body = {0};
    for (uint32_t i = 0; i < scope->size; i++) {
        const struct connection *c = scope->ranks[i];
        bytes_put_u32(&body, c->request.blob_size);
        bytes_put(&body, c->in.data + c->request.scope_size, c->request.blob_size);
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
    return error_set(error, BHVD_ERR_TIMEOUT, "rank%s %s of %u did not arrive within %s (scope %s)",
                     missing == 1 ? "" : "s", names, scope->size, duration(limit_ms).text, scope->name);
}

static struct scope *scope_find_or_create(struct bhvd_rendezvous *server, const char *name, uint32_t size)
{
    for (struct scope *s = server->scopes; s; s = s->next)
        if (strcmp(s->name, name) == 0)
            return s;
    struct scope *s = calloc(1, sizeof *s + size * sizeof s->ranks[0]);
    if (s) {
        snprintf(s->name, sizeof s->name, "%s", name);
        s->size = size;
        s->next = server->scopes;
        server->scopes = s;
    }
    return s;
}

static bhvd_status scope_check(const struct scope *scope, const struct request *r, struct bhvd_error *error)
{
    if (r->size != scope->size)
        return error_set(error, BHVD_ERR_MISMATCH, "rank %u counts %u ranks in the job, others count %u (scope %s)",
                         r->rank, r->size, scope->size, scope->name);
    if (r->rank >= scope->size)
        return error_set(error, BHVD_ERR_MISMATCH, "a process says it is rank %u of %u; ranks are 0 to %u (scope %s)",
                         r->rank, r->size, r->size - 1, scope->name);
    if (scope->ranks[r->rank])
        return error_set(error, BHVD_ERR_MISMATCH, "two processes say they are rank %u of %u (scope %s)", r->rank,
                         r->size, scope->name);
    return BHVD_OK;
}

// The request is complete.
static void scope_join(struct bhvd_rendezvous *server, struct connection *c)
{
    const struct request *r = &c->request;
    char name[RENDEZVOUS_SCOPE_MAX + 1] = {0};
    memcpy(name, c->in.data, r->scope_size);
    struct scope *scope = scope_find_or_create(server, name, r->size);
    if (!scope) {
        connection_drop(server, c);
        return;
    }
    struct bhvd_error error;
    if (scope_check(scope, r, &error)) {
        struct reply *reply = reply_sentence(&error);
        connection_answer(server, c, reply);
        scope_answer(server, scope, reply);
        reply_drop(reply);
        return;
    }
    c->stage = WAITING;
    c->deadline_ns = r->patience_ms == UINT32_MAX ? CLOCK_NEVER : clock_now_ns() + (int64_t)r->patience_ms * 1000000;
    c->scope = scope;
    scope->ranks[r->rank] = c;
    if (++scope->arrived == scope->size) {
        struct reply *reply = scope_all_blobs(scope);
        scope_answer(server, scope, reply);
        reply_drop(reply);
    }
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
    case HELLO:
        if (auth_begin(&c->auth, AUTH_ACCEPTED, NULL)
            || auth_receive_hello(&c->auth, c->in.data, server->secret, server->secret_size, NULL))
            goto drop;
        bytes_put(&c->out, c->auth.hello, sizeof c->auth.hello);
        bytes_put(&c->out, c->auth.proof, sizeof c->auth.proof);
        if (c->out.failed)
            goto drop;
        connection_expect(c, PROOF, AUTH_PROOF_SIZE);
        connection_write(server, c);
        return;
    case PROOF:
        if (auth_receive_proof(&c->auth, c->in.data, NULL))
            goto drop;
        server->stranger_count--;
        connection_expect(c, HEAD, REQUEST_HEAD_SIZE);
        return;
    case HEAD:
        if (!request_take(&reader, &c->request))
            goto drop;
        connection_expect(c, BODY, c->request.scope_size + c->request.blob_size);
        return;
    case BODY:
        if (memchr(c->in.data, '\0', c->request.scope_size))
            goto drop;
        scope_join(server, c);
        return;
    case WAITING: case REPLYING:
        return;
    }
drop:
    connection_drop(server, c);
}

static void connection_read(struct bhvd_rendezvous *server, struct connection *c)
{
    unsigned char buffer[REQUEST_BODY_MAX];
    size_t moved;
    while (c->fd >= 0 && c->stage < WAITING) {
        if (socket_read(c->fd, buffer, c->wanted - c->in.size, &moved)) {
            connection_drop(server, c);
            return;
        }
        if (moved == 0)
            return;
        bytes_put(&c->in, buffer, moved);
        if (c->in.failed)
            connection_drop(server, c);
        else if (c->in.size == c->wanted)
            connection_advance(server, c);
    }
    // Who waits has said everything: what comes is the end of the connection, or nonsense.
    if (c->fd >= 0 && c->stage == WAITING && (socket_read(c->fd, buffer, 1, &moved) || moved > 0))
        connection_drop(server, c);
}

// A rank that gave up ends its scope: the others could only wait in vain, and would then name that rank as missing.
static void connection_expire(struct bhvd_rendezvous *server, struct connection *c)
{
    if (c->stage != WAITING) {
        connection_drop(server, c);
        return;
    }
    struct bhvd_error error;
    scope_missing_ranks(c->scope, c->request.limit_ms, &error);
    struct reply *reply = reply_sentence(&error);
    scope_answer(server, c->scope, reply);
    reply_drop(reply);
}

// False when there is none to evict.
static bool evict_oldest_stranger(struct bhvd_rendezvous *server)
{
    for (size_t i = 0; i < server->count; i++) {
        struct connection *c = server->connections[i];
        if (c->fd >= 0 && c->stage <= PROOF) {
            connection_drop(server, c);
            return true;
        }
    }
    return false;
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
    void *polls = realloc(server->polls, (2 + capacity) * sizeof server->polls[0]);
    if (!polls)
        return false;
    server->polls = polls;
    server->capacity = capacity;
    return true;
}

static void accept_some(struct bhvd_rendezvous *server)
{
    for (int i = 0; i < ACCEPT_BATCH; i++) {
        int fd = -1;
        bhvd_status status = socket_accept(server->listen_fd, 0, &fd, NULL);
        if (status == BHVD_ERR_TIMEOUT)
            return;
        if (status) {
            if (evict_oldest_stranger(server))
                continue;
            server->accept_again_ns = clock_deadline_ns(ACCEPT_PAUSE_MS);
            return;
        }
        struct connection *c = reserve_connection(server) ? calloc(1, sizeof *c) : NULL;
        if (!c) {
            close(fd);
            return;
        }
        if (server->stranger_count >= STRANGERS_MAX)
            evict_oldest_stranger(server);
        c->fd = fd;
        c->deadline_ns = clock_deadline_ns(REQUEST_TIME_MS);
        connection_expect(c, HELLO, AUTH_HELLO_SIZE);
        server->connections[server->count++] = c;
        server->stranger_count++;
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
    server->polls[1] = (struct pollfd){.fd = server->listen_fd, .events = POLLIN};
    if (server->accept_again_ns) {
        if (clock_now_ns() < server->accept_again_ns) {
            wake_ns = server->accept_again_ns;
            server->polls[1].fd = -1;
        } else {
            server->accept_again_ns = 0;
        }
    }
    for (size_t i = 0; i < server->count; i++) {
        const struct connection *c = server->connections[i];
        short events = (c->stage <= WAITING ? POLLIN : 0) | (c->out.size > 0 || c->reply ? POLLOUT : 0);
        server->polls[2 + i] = (struct pollfd){.fd = c->fd, .events = events};
        if (c->deadline_ns < wake_ns)
            wake_ns = c->deadline_ns;
    }
    if (poll(server->polls, 2 + server->count, clock_remaining_ms(wake_ns)) < 0) {
        for (size_t i = 0; i < 2 + server->count; i++)
            server->polls[i].revents = 0;
        if (errno != EINTR)
            poll(NULL, 0, ACCEPT_PAUSE_MS);     // out of kernel memory: do not spin
    }
}

static void *serve(void *arg)
{
    struct bhvd_rendezvous *server = arg;
    for (;;) {
        wait_for_events(server);
        if (server->polls[0].revents)
            return NULL;
        size_t polled = server->count;
        for (size_t i = 0; i < polled; i++) {
            struct connection *c = server->connections[i];
            if (server->polls[2 + i].revents) {     // a failure too: writing or reading then finds it
                connection_write(server, c);
                connection_read(server, c);
            }
        }
        int64_t now = clock_now_ns();
        for (size_t i = 0; i < polled; i++)
            if (server->connections[i]->fd >= 0 && server->connections[i]->deadline_ns <= now)
                connection_expire(server, server->connections[i]);
        if (server->polls[1].revents)
            accept_some(server);
        free_dropped(server);
    }
}

// The thread has ended, or never began.
static void server_free(struct bhvd_rendezvous *server)
{
    for (size_t i = 0; i < server->count; i++)
        connection_drop(server, server->connections[i]);
    free_dropped(server);
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

bhvd_status bhvd_rendezvous_create(const char *host, int port, const void *secret, size_t secret_size,
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
    status = socket_listen(host, port, &server->listen_fd, &server->port, error);
    if (status)
        goto fail;

    // Signals are the program's own threads' business.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int failure = pthread_create(&server->thread, NULL, serve, server);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
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

int bhvd_rendezvous_port(const bhvd_rendezvous *rendezvous)
{
    return rendezvous->port;
}

void bhvd_rendezvous_destroy(bhvd_rendezvous *rendezvous)
{
    if (!rendezvous)
        return;
    eventfd_write(rendezvous->wake_fd, 1);
    pthread_join(rendezvous->thread, NULL);
    server_free(rendezvous);
}

// -------------------------------------------------------------------------------------------------- client ----

enum { RETRY_FIRST_MS = 5, RETRY_MAX_MS = 500, ANSWER_MARGIN_MS = 500 };

struct exchange {
    const struct rendezvous_address *address;
    const char *scope;
    uint32_t rank, size;
    int64_t deadline_ns;
    uint32_t limit_ms;          // the deadline as the user gave it
};

// Says who said it.
static bhvd_status name_server(const struct exchange *x, const struct bhvd_error *from, struct bhvd_error *error)
{
    return error_set(error, from->status, "rendezvous server at %s:%d: %.900s", x->address->host, x->address->port,
                     from->message);
}

// Tries until the server is up and convinced; what it may have dropped before then it has not acted upon.
static bhvd_status client_connect(const struct exchange *x, int *fd, struct bhvd_error *error)
{
    for (int pause_ms = RETRY_FIRST_MS;; pause_ms = pause_ms * 2 < RETRY_MAX_MS ? pause_ms * 2 : RETRY_MAX_MS) {
        struct bhvd_error last;
        bool connected = false;
        bhvd_status status = socket_connect(x->address->host, x->address->port, x->deadline_ns, fd, &last);
        if (!status) {
            connected = true;
            status = auth_handshake(*fd, AUTH_CONNECTED, x->address->secret, x->address->secret_size, x->deadline_ns,
                                    &last);
            if (!status)
                return BHVD_OK;
            close(*fd);
        }
        if (status == BHVD_ERR_AUTH || status == BHVD_ERR_ARGUMENT)
            return name_server(x, &last, error);
        int left_ms = clock_remaining_ms(x->deadline_ns);
        poll(NULL, 0, left_ms >= 0 && left_ms < pause_ms ? left_ms : pause_ms);
        if (clock_remaining_ms(x->deadline_ns) != 0)
            continue;
        if (connected)
            return name_server(x, &last, error);
        return error_set(error, BHVD_ERR_SYSTEM, "no rendezvous server answered at %s:%d within %s (%.300s): is the "
                         "launcher running, and does this host reach that address?", x->address->host,
                         x->address->port, duration(x->limit_ms).text, last.message);
    }
}

static bhvd_status client_request(const struct exchange *x, int fd, const struct rendezvous_blob *mine,
                                  struct bhvd_error *error)
{
    // The server answers a little earlier than this side gives up, so that its answer still arrives.
    int left_ms = clock_remaining_ms(x->deadline_ns);
    int margin_ms = left_ms / 4 < ANSWER_MARGIN_MS ? left_ms / 4 : ANSWER_MARGIN_MS;
    struct request request = {
        .rank = x->rank,
        .size = x->size,
        .patience_ms = left_ms < 0 ? UINT32_MAX : (uint32_t)(left_ms - margin_ms),
        .limit_ms = x->limit_ms,
        .scope_size = (uint32_t)strlen(x->scope),
        .blob_size = mine->size,
    };
    struct bytes message = {0};
    request_put(&message, &request);
    bytes_put(&message, x->scope, request.scope_size);
    bytes_put(&message, mine->data, mine->size);
    bhvd_status status = message.failed ? error_set(error, BHVD_ERR_SYSTEM, "out of memory for the rendezvous request")
                                        : socket_write_full(fd, message.data, message.size, x->deadline_ns);
    bytes_fini(&message);
    return status;
}

static bhvd_status client_reply(const struct exchange *x, int fd, struct rendezvous_blob *all, struct bhvd_error *error)
{
    unsigned char head[REPLY_HEAD_SIZE], *body = NULL;
    bhvd_status status = socket_read_full(fd, head, sizeof head, x->deadline_ns);
    if (status)
        return status;
    struct bytes_reader reader = {head, head + sizeof head, false};
    bool is_reply = bytes_take_u32(&reader) == REPLY_MAGIC;
    uint32_t answer = bytes_take_u32(&reader), body_size = bytes_take_u32(&reader);
    size_t body_max = answer == BHVD_OK ? x->size * (sizeof(uint32_t) + RENDEZVOUS_BLOB_MAX) : sizeof error->message - 1;
    if (!is_reply || answer > BHVD_ERR_SYSTEM || body_size > body_max)
        goto garbage;
    body = malloc(body_size + 1);
    if (!body)
        return error_set(error, BHVD_ERR_SYSTEM, "out of memory for the rendezvous reply");
    status = socket_read_full(fd, body, body_size, x->deadline_ns);
    if (status)
        goto out;
    if (answer != BHVD_OK) {
        body[body_size] = '\0';
        status = error_set(error, (bhvd_status)answer, "%s", (const char *)body);
        goto out;
    }
    reader = (struct bytes_reader){body, body + body_size, false};
    for (uint32_t i = 0; i < x->size; i++) {
        uint32_t blob_size = bytes_take_u32(&reader);
        const unsigned char *blob = blob_size <= RENDEZVOUS_BLOB_MAX ? bytes_take(&reader, blob_size) : NULL;
        if (!blob)
            goto garbage;
        all[i].size = blob_size;
        memcpy(all[i].data, blob, blob_size);
    }
    if (reader.at == reader.end)
        goto out;
garbage:
    status = error_set(error, BHVD_ERR_PEER_LOST, "rendezvous server at %s:%d: its reply cannot be read; install the "
                       "same bagua_hvd on every host", x->address->host, x->address->port);
out:
    free(body);
    return status;
}

bhvd_status rendezvous_exchange(const struct rendezvous_address *address, const char *scope, int rank, int size,
                                const struct rendezvous_blob *mine, struct rendezvous_blob *all, int64_t deadline_ns,
                                struct bhvd_error *error)
{
    struct bhvd_error unused;
    if (!error)
        error = &unused;
    error_clear(error);
    size_t scope_size = strlen(scope);
    if (size < 1 || size > RENDEZVOUS_SIZE_MAX || rank < 0 || rank >= size)
        return error_set(error, BHVD_ERR_ARGUMENT, "rank %d of %d: sizes are 1 to %d, ranks 0 to size - 1", rank, size,
                         RENDEZVOUS_SIZE_MAX);
    if (scope_size < 1 || scope_size > RENDEZVOUS_SCOPE_MAX || mine->size > RENDEZVOUS_BLOB_MAX)
        return error_set(error, BHVD_ERR_ARGUMENT, "a scope has 1 to %d bytes, this one %zu; a blob at most %d, this "
                         "one %u", RENDEZVOUS_SCOPE_MAX, scope_size, RENDEZVOUS_BLOB_MAX, mine->size);

    const struct exchange x = {address, scope, (uint32_t)rank, (uint32_t)size, deadline_ns,
                               (uint32_t)clock_remaining_ms(deadline_ns)};
    int fd;
    bhvd_status status = client_connect(&x, &fd, error);
    if (status)
        return status;
    status = client_request(&x, fd, mine, error);
    if (!status)
        status = client_reply(&x, fd, all, error);
    close(fd);
    if (status && error->status == BHVD_OK) {       // the socket's failure, which has no sentence yet
        if (status == BHVD_ERR_TIMEOUT)
            error_set(error, status, "rendezvous server at %s:%d did not answer within %s (scope %s)", address->host,
                      address->port, duration(x.limit_ms).text, scope);
        else
            error_set(error, status, "rendezvous server at %s:%d closed the connection before all ranks had arrived: "
                      "the launcher ended or was restarted (scope %s)", address->host, address->port, scope);
    }
    return status;
}
