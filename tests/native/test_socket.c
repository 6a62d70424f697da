// TCP between numeric addresses: both families, and errors that say where.
#include "check.h"
#include "sockets.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include "base/clock.h"

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
