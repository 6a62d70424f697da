// Data on a rendezvous connection, on either side, without socket waits: from strangers to the server; from peers that have
// proven the secret and send any requests; from a server that has proven it and sends any reply.
//
//     role (u8: 0 a stranger, 1 peers, 2 the server's reply, 3 a handshake), then for 0 and 1, repeatedly: connection (u8),
//     size (u16) and bytes
#include "fuzz.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>

// For access to its static functions.
#include "transport/rendezvous_client.c"
#include "transport/rendezvous_server.c"

#include "transport/auth.h"

enum { CONNECTIONS = 3, PIECES_MAX = 60 };

static const char SECRET[] = "a fuzzer's secret";
#define BINDING (struct auth_binding){AUTH_RENDEZVOUS, 0, AUTH_NO_RANK, 1}

static struct bhvd_rendezvous *make_server(void)
{
    struct sockaddr_un nowhere = {.sun_family = AF_UNIX};
    struct bhvd_rendezvous *server = calloc(1, sizeof *server);
    *server = (struct bhvd_rendezvous){.listen_fd = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0), .wake_fd = -1,
                                       .secret = malloc(sizeof SECRET), .secret_size = sizeof SECRET};
    memcpy(server->secret, SECRET, sizeof SECRET);
    server->handshakes = handshake_server_create(&(struct handshake_server_options){
        .listeners = {server->listen_fd, -1}, .bindings = {BINDING}, .secret = server->secret, .secret_size = sizeof SECRET,
        .name_size = REQUEST_HEAD_SIZE});
    // The kernel chooses an address.
    REQUIRE(server->handshakes && bind(server->listen_fd, (struct sockaddr *)&nowhere, sizeof nowhere.sun_family) == 0 &&
            listen(server->listen_fd, CONNECTIONS) == 0 && reserve_connection(server));
    return server;
}

static int attach(const struct bhvd_rendezvous *server)
{
    struct sockaddr_un address;
    socklen_t size = sizeof address;
    int far = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0);
    REQUIRE(getsockname(server->listen_fd, (struct sockaddr *)&address, &size) == 0 &&
            connect(far, (struct sockaddr *)&address, size) == 0);
    return far;
}

// A turn of the server for its handshakes.
static void shake_hands(struct bhvd_rendezvous *server)
{
    int64_t now_ns = 0;
    const int count = handshake_server_poll(server->handshakes, server->polls + 1, &now_ns);
    socket_poll(server->polls + 1, (size_t)count, now_ns);
    let_in(server, 1);
}

// The peer's side of a correct handshake.
static void prove(struct bhvd_rendezvous *server, int far)
{
    struct auth auth;
    uint8_t hello[AUTH_HELLO_SIZE], proof[AUTH_PROOF_SIZE];
    REQUIRE(!auth_begin(&auth, AUTH_CONNECTED, &BINDING, NULL));
    REQUIRE(send(far, auth.hello, sizeof auth.hello, 0) == sizeof auth.hello);
    shake_hands(server);
    REQUIRE(recv(far, hello, sizeof hello, 0) == sizeof hello && recv(far, proof, sizeof proof, 0) == sizeof proof);
    REQUIRE(!auth_receive_hello(&auth, hello, SECRET, sizeof SECRET, NULL) && !auth_receive_proof(&auth, proof, NULL));
    REQUIRE(send(far, auth.proof, sizeof auth.proof, 0) == sizeof auth.proof);
    shake_hands(server);
}

static void attack_server(struct supply *s, bool proven)
{
    struct bhvd_rendezvous *server = make_server();
    int far[CONNECTIONS];
    for (int i = 0; i < CONNECTIONS; i++) {
        far[i] = attach(server);
        shake_hands(server);
        if (proven)
            prove(server, far[i]);
    }
    for (int i = 0; i < PIECES_MAX && s->at < s->end; i++) {
        const int which = supply_u8(s) % CONNECTIONS;
        size_t size = supply_u16(s);
        const uint8_t *bytes = supply_bytes(s, &size);
        if (size)
            send(far[which], bytes, size, MSG_NOSIGNAL);
        shake_hands(server);
        REQUIRE(proven || server->count == 0);
        for (size_t k = 0; k < server->count; k++) {
            connection_read(server, server->connections[k]);
            connection_write(server->connections[k]);
        }
    }
    for (size_t k = 0; k < server->count; k++)
        if (server->connections[k]->fd >= 0 && k % 2)
            connection_expire(server->connections[k]);
    for (int i = 0; i < CONNECTIONS; i++)
        close(far[i]);
    server_free(server);
}

static void attack_client(struct supply *s)
{
    enum { RANKS = 3 };
    int pair[2];
    size_t size = (size_t)(s->end - s->at);
    struct rendezvous_address address = {"127.0.0.1", 1, SECRET, sizeof SECRET};
    const struct exchange x = {&address, "scope", 0, RANKS, clock_deadline_ns(1000), 1000};
    struct rendezvous_blob *all = calloc(RANKS, sizeof *all);
    struct bhvd_error error = {0};
    REQUIRE(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, pair) == 0);
    if (size)
        REQUIRE(send(pair[1], s->at, size, 0) == (ssize_t)size);
    shutdown(pair[1], SHUT_WR);
    if (client_reply(&x, pair[0], all, &error) == BHVD_OK) {
        for (int i = 0; i < RANKS; i++)
            REQUIRE(all[i].size <= RENDEZVOUS_BLOB_MAX);
    }
    free(all);
    close(pair[0]);
    close(pair[1]);
}

static void attack_handshake(struct supply *s)
{
    int pair[2];
    size_t size = (size_t)(s->end - s->at);
    struct bhvd_error error = {0};
    REQUIRE(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, pair) == 0);
    if (size)
        REQUIRE(send(pair[1], s->at, size, 0) == (ssize_t)size);
    shutdown(pair[1], SHUT_WR);
    enum auth_role role = size % 2 ? AUTH_CONNECTED : AUTH_ACCEPTED;
    REQUIRE(auth_handshake(pair[0], role, &BINDING, SECRET, sizeof SECRET, clock_deadline_ns(1000), &error) != BHVD_OK);
    close(pair[0]);
    close(pair[1]);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct supply s = {data, data + size};
    switch (supply_u8(&s) % 4) {
    case 0: attack_server(&s, false); break;
    case 1: attack_server(&s, true); break;
    case 2: attack_client(&s); break;
    default: attack_handshake(&s);
    }
    return 0;
}
