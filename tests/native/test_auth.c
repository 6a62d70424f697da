#include "check.h"
#include "sockets.h"

#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <pthread.h>
#include <sys/socket.h>

#include "base/clock.h"
#include "base/hmac.h"
#include "transport/auth.h"

struct side {
    int fd;
    enum auth_role role;
    struct auth_binding binding;
    const char *secret;
    bhvd_status status;
    struct bhvd_error error;
    pthread_t thread;
};

static void *run_side(void *arg)
{
    struct side *s = arg;
    s->error.message[0] = '\0';
    s->status = auth_handshake(s->fd, s->role, &s->binding, s->secret, strlen(s->secret), clock_deadline_ns(5000), &s->error);
    return NULL;
}

static void pair(int fds[2])
{
    CHECK_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds), 0);
}

// Runs both ends with their own secrets and roles; each side closes when it has finished, as users do.
static void handshake(struct side sides[2])
{
    int fds[2];
    pair(fds);
    for (int i = 0; i < 2; i++) {
        sides[i].fd = fds[i];
        CHECK_EQ(pthread_create(&sides[i].thread, NULL, run_side, &sides[i]), 0);
    }
    for (int i = 0; i < 2; i++)
        pthread_join(sides[i].thread, NULL);
    close(fds[0]);
    close(fds[1]);
}

static const struct auth_binding ANY = {AUTH_CHANNEL, 2, 1, 4242};

TEST(equal_secrets_convince_both_sides)
{
    struct side sides[2] = {{.role = AUTH_CONNECTED, .secret = "job 7"}, {.role = AUTH_ACCEPTED, .secret = "job 7"}};
    handshake(sides);
    CHECK_STATUS(sides[0].status, BHVD_OK);
    CHECK_STATUS(sides[1].status, BHVD_OK);
}

TEST(different_secrets_are_reported_to_both_sides)
{
    struct side sides[2] = {{.role = AUTH_CONNECTED, .secret = "job 7"}, {.role = AUTH_ACCEPTED, .secret = "job 8"}};
    handshake(sides);
    for (int i = 0; i < 2; i++) {
        CHECK_STATUS(sides[i].status, BHVD_ERR_AUTH);
        CHECK_EQ(sides[i].error.status, BHVD_ERR_AUTH);
        CHECK_STR_CONTAINS(sides[i].error.message, "_HOROVOD_SECRET_KEY");
        CHECK_STR_CONTAINS(sides[i].error.message, "secret differs");
    }
}

// A stranger that relays a handshake from a port that a rank takes for another one convinces neither side.
TEST(a_handshake_for_another_purpose_rank_or_port_does_not_convince)
{
    static const struct auth_binding others[] = {
        {AUTH_LOCAL, 2, 1, 4242}, {AUTH_CHANNEL, 2, 0, 4242}, {AUTH_CHANNEL, 2, 1, 4243}};
    for (size_t i = 0; i < sizeof others / sizeof others[0]; i++) {
        struct side sides[2] = {{.role = AUTH_CONNECTED, .binding = ANY, .secret = "s"},
                                {.role = AUTH_ACCEPTED, .binding = others[i], .secret = "s"}};
        handshake(sides);
        CHECK_STATUS(sides[0].status, BHVD_ERR_AUTH);
        CHECK_STATUS(sides[1].status, BHVD_ERR_AUTH);
    }
}

// A relay that changes the caller's rank convinces neither side.
TEST(another_callers_hello_does_not_convince)
{
    struct auth a, b;
    uint8_t hello[AUTH_HELLO_SIZE];
    CHECK_STATUS(auth_begin(&a, AUTH_CONNECTED, &ANY, NULL), BHVD_OK);
    CHECK_STATUS(auth_begin(&b, AUTH_ACCEPTED, &ANY, NULL), BHVD_OK);
    memcpy(hello, a.hello, sizeof hello);
    hello[8] = 3;
    CHECK_STATUS(auth_receive_hello(&a, b.hello, "s", 1, NULL), BHVD_OK);
    CHECK_STATUS(auth_receive_hello(&b, hello, "s", 1, NULL), BHVD_OK);
    CHECK_STATUS(auth_receive_proof(&a, b.proof, NULL), BHVD_ERR_AUTH);
    CHECK_STATUS(auth_receive_proof(&b, a.proof, NULL), BHVD_ERR_AUTH);
}

TEST(two_sides_of_one_role_do_not_convince)
{
    struct side sides[2] = {{.role = AUTH_CONNECTED, .secret = "s"}, {.role = AUTH_CONNECTED, .secret = "s"}};
    handshake(sides);
    CHECK_STATUS(sides[0].status, BHVD_ERR_AUTH);
    CHECK_STATUS(sides[1].status, BHVD_ERR_AUTH);
}

// A peer without the secret that sends everything back.
TEST(a_reflected_handshake_does_not_convince)
{
    int fds[2];
    pair(fds);
    struct side side = {.fd = fds[0], .role = AUTH_CONNECTED, .secret = "s"};
    CHECK_EQ(pthread_create(&side.thread, NULL, run_side, &side), 0);
    uint8_t bytes[AUTH_HELLO_SIZE + AUTH_PROOF_SIZE];
    int64_t deadline_ns = clock_deadline_ns(5000);
    CHECK_STATUS(socket_read_full(fds[1], bytes, AUTH_HELLO_SIZE, deadline_ns), BHVD_OK);
    CHECK_STATUS(socket_write_full(fds[1], bytes, AUTH_HELLO_SIZE, deadline_ns), BHVD_OK);
    CHECK_STATUS(socket_read_full(fds[1], bytes, AUTH_PROOF_SIZE, deadline_ns), BHVD_OK);
    CHECK_STATUS(socket_write_full(fds[1], bytes, AUTH_PROOF_SIZE, deadline_ns), BHVD_OK);
    pthread_join(side.thread, NULL);
    CHECK_STATUS(side.status, BHVD_ERR_AUTH);
    close(fds[0]);
    close(fds[1]);
}

// The bytes are as documented at the top of auth.h: changing them requires a new version.
TEST(the_proof_is_the_documented_one)
{
    struct auth a, b;
    CHECK_STATUS(auth_begin(&a, AUTH_CONNECTED, &ANY, NULL), BHVD_OK);
    CHECK_STATUS(auth_begin(&b, AUTH_ACCEPTED, &(struct auth_binding){AUTH_CHANNEL, AUTH_NO_RANK, 1, 4242}, NULL), BHVD_OK);
    CHECK(memcmp(a.hello, b.hello, AUTH_HELLO_SIZE) != 0);
    CHECK_MEM_EQ(a.hello, "BHVD\2\0\0\0\2\0\0\0", 12);
    CHECK_STATUS(auth_receive_hello(&a, b.hello, "key", 3, NULL), BHVD_OK);
    CHECK_STATUS(auth_receive_hello(&b, a.hello, "key", 3, NULL), BHVD_OK);

    CHECK_EQ(b.binding.caller, 2);
    uint8_t message[14 + 2 * AUTH_NONCE_SIZE] = {'c', 'c', 2, 0, 0, 0, 1, 0, 0, 0, 4242 & 255, 4242 >> 8}, proof[AUTH_PROOF_SIZE];
    memcpy(message + 14, a.hello + 12, AUTH_NONCE_SIZE);
    memcpy(message + 14 + AUTH_NONCE_SIZE, b.hello + 12, AUTH_NONCE_SIZE);
    hmac_sha256(proof, "key", 3, message, sizeof message);
    CHECK_MEM_EQ(a.proof, proof, AUTH_PROOF_SIZE);
    CHECK_STATUS(auth_receive_proof(&b, proof, NULL), BHVD_OK);

    for (int bit = 0; bit < 8 * AUTH_PROOF_SIZE; bit++) {
        proof[bit / 8] ^= 1 << bit % 8;
        CHECK_STATUS(auth_receive_proof(&b, proof, NULL), BHVD_ERR_AUTH);
        proof[bit / 8] ^= 1 << bit % 8;
    }
}

TEST(garbage_and_other_versions_are_named)
{
    struct auth a;
    struct bhvd_error error;
    uint8_t hello[AUTH_HELLO_SIZE] = "GET / HTTP/1.1\r\n";
    CHECK_STATUS(auth_begin(&a, AUTH_ACCEPTED, &ANY, &error), BHVD_OK);
    CHECK_STATUS(auth_receive_hello(&a, hello, "s", 1, &error), BHVD_ERR_PEER_LOST);
    CHECK_STR_CONTAINS(error.message, "another program");
    memcpy(hello, a.hello, sizeof hello);
    hello[4] = 9;
    CHECK_STATUS(auth_receive_hello(&a, hello, "s", 1, &error), BHVD_ERR_PEER_LOST);
    CHECK_STR_CONTAINS(error.message, "version 9");
}

TEST(a_silent_peer_ends_at_the_deadline)
{
    int fds[2];
    pair(fds);
    struct bhvd_error error;
    int64_t start = check_now_ms();
    CHECK_STATUS(auth_handshake(fds[0], AUTH_CONNECTED, &ANY, "s", 1, clock_deadline_ns(100), &error), BHVD_ERR_TIMEOUT);
    CHECK(check_now_ms() - start >= 100);
    CHECK(check_now_ms() - start < 3000);
    CHECK_EQ(fcntl(fds[0], F_GETFL) & O_NONBLOCK, 0);
    close(fds[0]);
    close(fds[1]);
}

TEST(a_peer_that_hangs_up_is_lost)
{
    for (size_t sent = 0; sent < AUTH_HELLO_SIZE + AUTH_PROOF_SIZE; sent += 13) {
        int fds[2];
        pair(fds);
        uint8_t bytes[AUTH_HELLO_SIZE + AUTH_PROOF_SIZE] = {'B', 'H', 'V', 'D', 2};
        struct bhvd_error error;
        CHECK_STATUS(socket_write_full(fds[1], bytes, sent, clock_deadline_ns(1000)), BHVD_OK);
        shutdown(fds[1], SHUT_WR);
        CHECK_STATUS(auth_handshake(fds[0], AUTH_CONNECTED, &ANY, "s", 1, CLOCK_NEVER, &error), BHVD_ERR_PEER_LOST);
        CHECK_STR_CONTAINS(error.message, "hung up");
        close(fds[1]);
        // Writing to a closed socket does not raise SIGPIPE either.
        CHECK_STATUS(auth_handshake(fds[0], AUTH_CONNECTED, &ANY, "s", 1, CLOCK_NEVER, &error), BHVD_ERR_PEER_LOST);
        close(fds[0]);
    }
}

TEST(addresses_are_of_either_family)
{
    int every, one, fd, port, one_port;
    struct bhvd_error error;
    CHECK_STATUS(socket_listen("::", 0, 0, &every, &port, &error), BHVD_OK);
    CHECK_STATUS(socket_connect("127.0.0.1", port, CLOCK_NEVER, &fd, &error), BHVD_OK);
    close(fd);
    if (socket_listen("::1", 0, 0, &one, &one_port, &error) == BHVD_OK) {      // otherwise the machine has no IPv6
        CHECK_STATUS(socket_connect("::1", port, CLOCK_NEVER, &fd, &error), BHVD_OK);
        close(fd);
        CHECK_STATUS(socket_connect("::1", one_port, CLOCK_NEVER, &fd, &error), BHVD_OK);
        close(fd);
        CHECK_STATUS(socket_connect("127.0.0.1", one_port, CLOCK_NEVER, &fd, &error), BHVD_ERR_SYSTEM);
        close(one);
        char where[64];
        snprintf(where, sizeof where, "cannot connect to [::1]:%d: Connection refused", one_port);
        CHECK_STATUS(socket_connect("::1", one_port, CLOCK_NEVER, &fd, &error), BHVD_ERR_SYSTEM);
        CHECK_STR_CONTAINS(error.message, where);
    }
    close(every);
    const char *const wrong[] = {"[::1]", "fe80::1%lo", "fd00::1::2", "10.0.1", ""};
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++)
        CHECK_STATUS(socket_connect(wrong[i], port, CLOCK_NEVER, &fd, &error), BHVD_ERR_ARGUMENT);
}

static void check_self_connection(struct sockaddr *address, socklen_t size, const char *host)
{
    struct bhvd_error error;
    int fd = socket(address->sa_family, SOCK_STREAM, 0);
    if (bind(fd, address, size)) {      // no IPv6
        close(fd);
        return;
    }
    CHECK_EQ(getsockname(fd, address, &size), 0);
    CHECK_EQ(connect(fd, address, size), 0);
    CHECK_STATUS(socket_connect_complete(fd, host, 1, &error), BHVD_ERR_SYSTEM);
    CHECK_STR_CONTAINS(error.message, "Connection refused");
}

TEST(a_socket_that_is_connected_with_itself_has_reached_nobody)
{
    struct sockaddr_in v4 = {.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};
    struct sockaddr_in6 v6 = {.sin6_family = AF_INET6, .sin6_addr = IN6ADDR_LOOPBACK_INIT};
    check_self_connection((struct sockaddr *)&v4, sizeof v4, "127.0.0.1");
    check_self_connection((struct sockaddr *)&v6, sizeof v6, "::1");
}

TEST(connecting_to_nobody_says_where)
{
    int fd, port;
    struct bhvd_error error;
    CHECK_STATUS(socket_listen("127.0.0.1", 0, 0, &fd, &port, &error), BHVD_OK);
    CHECK(fcntl(fd, F_GETFD) & FD_CLOEXEC);
    int other;
    CHECK_STATUS(socket_accept(fd, 0, &other, &error), BHVD_ERR_TIMEOUT);
    CHECK_STATUS(socket_connect("127.0.0.1", port, CLOCK_NEVER, &other, &error), BHVD_OK);
    close(other);
    close(fd);
    char where[64];
    snprintf(where, sizeof where, "127.0.0.1:%d", port);
    CHECK_STATUS(socket_connect("127.0.0.1", port, CLOCK_NEVER, &other, &error), BHVD_ERR_SYSTEM);
    CHECK_STR_CONTAINS(error.message, where);
    CHECK_STATUS(socket_connect("localhost", port, CLOCK_NEVER, &other, &error), BHVD_ERR_ARGUMENT);
    CHECK_STATUS(socket_connect("127.0.0.1", 65536, CLOCK_NEVER, &other, &error), BHVD_ERR_ARGUMENT);
    CHECK_STATUS(socket_listen("192.0.2.1", 0, 0, &fd, &port, &error), BHVD_ERR_SYSTEM);
    CHECK_STR_CONTAINS(error.message, "192.0.2.1:0");
}
