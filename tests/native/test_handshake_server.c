// Eviction when there are too many strangers: only peers that have not proven the secret; and which peers are accepted.
#include "check.h"
#include "sockets.h"

#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>

#include "base/clock.h"
#include "transport/handshake_server.h"

enum { MORE = 100, LIMIT_MS = 10000, NAME_SIZE = 4 };

static const char SECRET[] = "a handshake test's secret";

struct service {
    struct handshake_server *handshakes;
    int listener, port;
    struct auth_binding binding;
};

static void serve_one_look(struct service *service, struct authenticated *peer, bool *is_known)
{
    struct pollfd polls[HANDSHAKE_POLLS_MAX];
    int64_t wake_ns = clock_deadline_ns(10);
    const int count = handshake_server_poll(service->handshakes, polls, &wake_ns);
    socket_poll(polls, (size_t)count, wake_ns);
    while (handshake_server_next(service->handshakes, polls, peer) == BHVD_OK)
        *is_known = true;
}

static void serve_looks(struct service *service, int looks)
{
    struct authenticated peer;
    bool is_known = false;
    for (int i = 0; i < looks; i++)
        serve_one_look(service, &peer, &is_known);
    CHECK(!is_known);
}

static void start(struct service *service)
{
    CHECK_STATUS(socket_listen("127.0.0.1", 0, 0, &service->listener, &service->port, NULL), BHVD_OK);
    service->binding = (struct auth_binding){AUTH_CHANNEL, 1, 0, service->port};
    service->handshakes = handshake_server_create(&(struct handshake_server_options){.listeners = {service->listener, -1}, .bindings = {service->binding},
                                                                .secret = SECRET, .secret_size = sizeof SECRET, .name_size = NAME_SIZE});
    CHECK(service->handshakes);
}

static void stop(struct service *service)
{
    handshake_server_destroy(service->handshakes);
    close(service->listener);
}

static int knock(const struct service *service)
{
    int fd;
    CHECK_STATUS(socket_connect("127.0.0.1", service->port, clock_deadline_ns(LIMIT_MS), &fd, NULL), BHVD_OK);
    return fd;
}

static bool is_hung_up(int fd)
{
    char byte;
    return recv(fd, &byte, 1, MSG_DONTWAIT) == 0;
}

TEST(a_flood_evicts_random_strangers)
{
    static int fds[HANDSHAKE_STRANGERS_MAX + MORE];
    struct service service;
    int of_the_first = 0, of_all = 0;
    start(&service);
    for (int i = 0; i < HANDSHAKE_STRANGERS_MAX + MORE; i++) {
        fds[i] = knock(&service);
        serve_looks(&service, 1);
    }
    serve_looks(&service, 5);
    for (int i = 0; i < HANDSHAKE_STRANGERS_MAX + MORE; i++) {
        const bool is_gone = is_hung_up(fds[i]);
        of_all += is_gone;
        of_the_first += is_gone && i < MORE;
        close(fds[i]);
    }
    CHECK_EQ(of_all, MORE);
    CHECK(of_the_first < MORE);         // all of them with probability 10^-90
    stop(&service);
}

TEST(a_flood_evicts_nobody_that_has_proven_the_secret)
{
    static int fds[HANDSHAKE_STRANGERS_MAX + MORE];
    struct service service;
    struct auth auth;
    uint8_t theirs[AUTH_HELLO_SIZE + AUTH_PROOF_SIZE];
    struct authenticated peer;
    bool is_known = false;
    start(&service);
    const int fd = knock(&service);
    CHECK_STATUS(auth_begin(&auth, AUTH_CONNECTED, &service.binding, NULL), BHVD_OK);
    CHECK_EQ(send(fd, auth.hello, sizeof auth.hello, 0), sizeof auth.hello);
    serve_looks(&service, 3);
    CHECK_STATUS(socket_read_full(fd, theirs, sizeof theirs, clock_deadline_ns(LIMIT_MS)), BHVD_OK);
    CHECK_STATUS(auth_receive_hello(&auth, theirs, SECRET, sizeof SECRET, NULL), BHVD_OK);
    CHECK_STATUS(auth_receive_proof(&auth, theirs + AUTH_HELLO_SIZE, NULL), BHVD_OK);
    CHECK_EQ(send(fd, auth.proof, sizeof auth.proof, 0), sizeof auth.proof);
    serve_looks(&service, 3);
    for (int i = 0; i < HANDSHAKE_STRANGERS_MAX + MORE; i++) {
        fds[i] = knock(&service);
        serve_looks(&service, 1);
    }
    CHECK_EQ(send(fd, "name", NAME_SIZE, 0), NAME_SIZE);
    for (int i = 0; i < 100 && !is_known; i++)
        serve_one_look(&service, &peer, &is_known);
    CHECK(is_known && peer.rank == 1);
    CHECK_MEM_EQ(peer.name, "name", NAME_SIZE);
    close(peer.fd);
    close(fd);
    for (int i = 0; i < HANDSHAKE_STRANGERS_MAX + MORE; i++)
        close(fds[i]);
    stop(&service);
}

// Only root can become another user, and test the rejection.
TEST(another_users_process_is_hung_up_on_at_a_unix_socket)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    socklen_t size = sizeof address;
    const int listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    CHECK(bind(listener, (struct sockaddr *)&address, sizeof address.sun_family) == 0 && listen(listener, 8) == 0 &&
          getsockname(listener, (struct sockaddr *)&address, &size) == 0);
    const struct auth_binding binding = {AUTH_LOCAL, 1, 0, 0};
    struct service service = {.listener = listener};
    service.handshakes = handshake_server_create(&(struct handshake_server_options){.listeners = {-1, listener}, .bindings = {{0}, binding},
                                                               .secret = SECRET, .secret_size = sizeof SECRET, .name_size = NAME_SIZE});
    const int same_user = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    CHECK_EQ(connect(same_user, (struct sockaddr *)&address, size), 0);
    CHECK(socket_is_of_this_user(same_user));
    serve_looks(&service, 3);
    CHECK(!is_hung_up(same_user));
    const pid_t child = geteuid() == 0 ? fork() : -1;
    if (child == 0) {
        const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
        char byte;
        const bool is_other = setuid(65534) == 0 && connect(fd, (struct sockaddr *)&address, size) == 0;
        _exit(is_other && !socket_is_of_this_user(fd) && recv(fd, &byte, 1, 0) == 0 ? 0 : 1);
    }
    if (child > 0) {
        int status;
        while (waitpid(child, &status, WNOHANG) == 0)
            serve_looks(&service, 1);
        CHECK_EQ(status, 0);
    }
    close(same_user);
    stop(&service);
}
