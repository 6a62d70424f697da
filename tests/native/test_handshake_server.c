// Strangers at a listener: eviction when there are too many, introductions in pieces, and other users.
#include "check.h"
#include "sockets.h"

#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>

#include "base/clock.h"
#include "transport/listener.c"

enum { MORE = 100, LIMIT_MS = 10000 };

struct service {
    struct handshake_server handshakes;
    int listener, port;
};

static void serve_one_look(struct service *service, struct stranger *peer, bool *is_known)
{
    struct pollfd polls[HANDSHAKE_POLLS_MAX];
    int64_t wake_ns = clock_deadline_ns(10);
    const int count = handshake_server_poll(&service->handshakes, polls, &wake_ns);
    socket_poll(polls, (size_t)count, wake_ns);
    while (handshake_server_next(&service->handshakes, polls, peer) == BHVD_OK)
        *is_known = true;
}

static void serve_looks(struct service *service, int looks)
{
    struct stranger peer;
    bool is_known = false;
    for (int i = 0; i < looks; i++)
        serve_one_look(service, &peer, &is_known);
    CHECK(!is_known);
}

static void start(struct service *service)
{
    CHECK_STATUS(socket_listen("127.0.0.1", 0, 0, &service->listener, &service->port, NULL), BHVD_OK);
    service->handshakes = (struct handshake_server){.listeners = {service->listener, -1}};
}

static void stop(struct service *service)
{
    handshake_server_close(&service->handshakes);
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

TEST(an_introduction_may_come_in_pieces)
{
    struct service service;
    struct stranger peer;
    bool is_known = false;
    const struct introduction introduction = {1, CHANNEL_CONTROL, 1, "not checked here"};
    start(&service);
    const int fd = knock(&service);
    CHECK_EQ(send(fd, &introduction, 20, 0), 20);
    serve_looks(&service, 3);
    const size_t rest = sizeof introduction - 20;
    CHECK_EQ(send(fd, (const char *)&introduction + 20, rest, 0), rest);
    for (int i = 0; i < 100 && !is_known; i++)
        serve_one_look(&service, &peer, &is_known);
    CHECK(is_known && peer.listener == HANDSHAKE_TCP);
    CHECK_MEM_EQ(&peer.introduction, &introduction, sizeof introduction);
    close(peer.fd);
    close(fd);
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
    struct service service = {.handshakes.listeners = {-1, listener}, .listener = listener};
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
