// TCP between numeric addresses: both families, errors that say where, and what the kernel knows of a peer that is silent.
#include "check.h"
#include "sockets.h"

#include <fcntl.h>
#include <linux/filter.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include "base/clock.h"
#include "transport/channel.h"

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
    CHECK_STATUS(socket_accept(fd, &other), BHVD_ERR_TIMEOUT);
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

// ----------------------------------------------------------------------------------------------------- acknowledgements

static void connect_pair(struct channel *channel, int *other)
{
    int listening, port;
    struct bhvd_error error;
    *channel = (struct channel){.ops = &channel_tcp_ops};
    CHECK_STATUS(socket_listen("127.0.0.1", 0, 0, &listening, &port, &error), BHVD_OK);
    CHECK_STATUS(socket_connect("127.0.0.1", port, CLOCK_NEVER, &channel->fd, &error), BHVD_OK);
    CHECK_STATUS(socket_await(listening, POLLIN, CLOCK_NEVER), BHVD_OK);
    CHECK_STATUS(socket_accept(listening, other), BHVD_OK);
    close(listening);
}

// Newer kernels require CAP_NET_ADMIN.
static bool drop_what_comes(int fd)
{
    struct sock_filter nothing = {.code = BPF_RET | BPF_K, .k = 0};
    const struct sock_fprog program = {.len = 1, .filter = &nothing};
    return setsockopt(fd, SOL_SOCKET, SO_ATTACH_FILTER, &program, sizeof program) == 0;
}

// User-mode emulators (qemu-user) fill in only the first word, without acknowledgements.
static bool kernel_counts_acknowledgements(int fd)
{
    struct tcp_info info;
    socklen_t size = sizeof info;
    CHECK_EQ(getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &size), 0);
    return size > sizeof(uint32_t);
}

static int64_t silence_ns(struct channel *channel) { return channel->ops->silence_ns(channel, clock_now_ns()); }

// The kernel's clock is real, so this takes a few milliseconds. Before the first call with data in flight the connection was
// idle, not silent.
TEST(the_kernel_knows_for_how_long_a_peer_has_acknowledged_nothing)
{
    enum { SILENT_MS = 10 };
    struct channel channel;
    struct iovec byte = {"x", 1};
    size_t moved;
    int other;
    for (int drops = 0; drops < 2; drops++) {
        connect_pair(&channel, &other);
        if (!kernel_counts_acknowledgements(channel.fd) || (drops && !drop_what_comes(other))) {
            printf(" (not here: this user, or this kernel, cannot break a connection)");
        } else {
            int64_t begun_ns = clock_now_ns();
            while (drops && clock_now_ns() - begun_ns < SILENT_MS * 1000000)
                CHECK_EQ(silence_ns(&channel), -1);
            begun_ns = clock_now_ns();
            CHECK_STATUS(channel.ops->send(&channel, &byte, 1, &moved), BHVD_OK);
            if (drops)
                CHECK_EQ(silence_ns(&channel), 0);
            for (int64_t silent_ns = 0; drops && silent_ns < SILENT_MS * 1000000; silent_ns = silence_ns(&channel))
                CHECK(silent_ns >= 0 && silent_ns <= clock_now_ns() - begun_ns);
            while (!drops && silence_ns(&channel) >= 0)
                CHECK(clock_now_ns() - begun_ns < 60000 * INT64_C(1000000));
        }
        close(channel.fd);
        close(other);
    }
}
