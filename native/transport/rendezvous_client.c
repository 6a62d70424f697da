// The client; the server is in rendezvous_server.c.
#include "transport/rendezvous.h"

#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/status.h"
#include "transport/auth.h"
#include "transport/rendezvous_wire.h"
#include "transport/socket.h"

enum { RETRY_FIRST_MS = 5, RETRY_MAX_MS = 500, ANSWER_MARGIN_MS = 500 };

struct exchange {
    const struct rendezvous_address *address;
    const char *scope;
    uint32_t rank, size;
    int64_t deadline_ns;
    uint32_t limit_ms;          // the timeout as the user set it
};

// Prefixes the message with the server's address.
static bhvd_status name_server(const struct exchange *x, const struct bhvd_error *from, struct bhvd_error *error)
{
    return error_set(error, from->status, "rendezvous server at %s: %.900s",
                     socket_name(x->address->host, x->address->port).text, from->message);
}

// Retries until the server is up and authenticated; it has not acted on connections that it dropped before.
static bhvd_status client_connect(const struct exchange *x, int *fd, struct bhvd_error *error)
{
    const struct auth_binding binding = {AUTH_RENDEZVOUS, (int32_t)x->rank, AUTH_NO_RANK, x->address->port};
    for (int pause_ms = RETRY_FIRST_MS;; pause_ms = pause_ms * 2 < RETRY_MAX_MS ? pause_ms * 2 : RETRY_MAX_MS) {
        struct bhvd_error last;
        bool connected = false;
        bhvd_status status = socket_connect(x->address->host, x->address->port, x->deadline_ns, fd, &last);
        if (!status) {
            connected = true;
            status = auth_handshake(*fd, AUTH_CONNECTED, &binding, x->address->secret, x->address->secret_size,
                                    x->deadline_ns, &last);
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
        return error_set(error, BHVD_ERR_SYSTEM, "no rendezvous server answered at %s within %s (%.300s): is the "
                         "launcher running, and does this host reach that address?",
                         socket_name(x->address->host, x->address->port).text, rendezvous_duration(x->limit_ms).text, last.message);
    }
}

static bhvd_status client_request(const struct exchange *x, int fd, const struct rendezvous_blob *mine,
                                  struct bhvd_error *error)
{
    // Asks the server to respond a little before this side gives up, so that the response still arrives.
    int left_ms = clock_remaining_ms(x->deadline_ns);
    int margin_ms = left_ms / 4 < ANSWER_MARGIN_MS ? left_ms / 4 : ANSWER_MARGIN_MS;
    struct rendezvous_request request = {
        .rank = x->rank,
        .size = x->size,
        .respond_within_ms = left_ms < 0 ? UINT32_MAX : (uint32_t)(left_ms - margin_ms),
        .limit_ms = x->limit_ms,
        .scope_size = (uint32_t)strlen(x->scope),
        .blob_size = mine->size,
    };
    struct bytes message = {0};
    rendezvous_request_put(&message, &request);
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
    size_t blobs_max = x->size * (sizeof(uint32_t) + RENDEZVOUS_BLOB_MAX), sentence_max = sizeof error->message - 1;
    if (!is_reply || answer > BHVD_ERR_SYSTEM || body_size > (answer == BHVD_OK ? blobs_max : sentence_max))
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
    status = error_set(error, BHVD_ERR_PEER_LOST, "rendezvous server at %s: its reply cannot be read; install the "
                       "same bagua_hvd on every host", socket_name(x->address->host, x->address->port).text);
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
    if (status && error->status == BHVD_OK) {       // the socket's failure, which has no message yet
        if (status == BHVD_ERR_TIMEOUT)
            error_set(error, status, "rendezvous server at %s did not answer within %s (scope %s)",
                      socket_name(address->host, address->port).text, rendezvous_duration(x.limit_ms).text, scope);
        else
            error_set(error, status, "rendezvous server at %s closed the connection before all ranks had arrived: "
                      "the launcher ended or was restarted (scope %s)", socket_name(address->host, address->port).text,
                      scope);
    }
    return status;
}
