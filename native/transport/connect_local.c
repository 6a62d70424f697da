#include "transport/connect.h"

#include <errno.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/status.h"
#include "transport/listener.h"
#include "transport/socket.h"

#ifndef MFD_NOEXEC_SEAL                 // before glibc 2.38
#define MFD_NOEXEC_SEAL 8u
#endif

// The nonce in hexadecimal. An abstract name (leading zero byte) leaves nothing behind in a file system.
static struct sockaddr_un local_address(const struct endpoint *info, socklen_t *size)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    for (size_t i = 0; i < sizeof info->nonce; i++)
        snprintf(address.sun_path + 1 + 2 * i, 3, "%02x", info->nonce[i]);
    *size = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + 2 * sizeof info->nonce);
    return address;
}

bhvd_status local_listen(struct connecting *k, const struct endpoint *mine)
{
    socklen_t size;
    struct sockaddr_un address = local_address(mine, &size);
    k->local_listen_fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (k->local_listen_fd < 0 || bind(k->local_listen_fd, (struct sockaddr *)&address, size) != 0 ||
        listen(k->local_listen_fd, SOMAXCONN) != 0)
        return error_set(k->error, BHVD_ERR_SYSTEM, "cannot listen on a UNIX socket: %s%s", strerror(errno), socket_remedy(errno));
    return BHVD_OK;
}

// The socket is not yet authenticated.
static bhvd_status open_socket(struct connecting *k, int rank, int *out)
{
    socklen_t size;
    struct sockaddr_un address = local_address(&k->c->endpoints[rank], &size);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0)
        return error_set(k->error, BHVD_ERR_SYSTEM, "cannot make a UNIX socket: %s%s", strerror(errno), socket_remedy(errno));
    if (connect(fd, (struct sockaddr *)&address, size)) {
        const int failure = errno;
        close(fd);
        // The peer listened before this rank knew its address: if nobody listens, it has ended. EAGAIN: its queue is full.
        return error_set(k->error, failure == ECONNREFUSED ? BHVD_ERR_SYSTEM : BHVD_ERR_PEER_LOST,
                         "rank %d on this host cannot be reached: %s", rank, strerror(failure));
    }
    if (!socket_is_of_this_user(fd)) {
        close(fd);
        return error_set(k->error, BHVD_ERR_SYSTEM, "rank %d on this host runs as another user: start all ranks of a host as one",
                         rank);
    }
    *out = fd;
    return BHVD_OK;
}

// One message with descriptors, plus one byte, since a message must not be empty.
static bhvd_status send_fds(int socket_fd, const int *fds, int count, int64_t deadline_ns)
{
    char byte = 0;
    union {
        struct cmsghdr align;
        char space[CMSG_SPACE(2 * sizeof(int))];
    } control = {0};
    struct iovec part = {&byte, 1};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = control.space,
                             .msg_controllen = CMSG_SPACE((size_t)count * sizeof(int))};
    struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    *header = (struct cmsghdr){.cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS,
                               .cmsg_len = CMSG_LEN((size_t)count * sizeof(int))};
    memcpy(CMSG_DATA(header), fds, (size_t)count * sizeof(int));
    for (;;) {
        if (sendmsg(socket_fd, &message, MSG_NOSIGNAL) == 1)
            return BHVD_OK;
        if ((errno != EAGAIN && errno != EINTR) || socket_await(socket_fd, POLLOUT, deadline_ns))
            return BHVD_ERR_PEER_LOST;
    }
}

// BHVD_ERR_SYSTEM: they arrived, but this process has no free descriptors.
static bhvd_status receive_fds(int socket_fd, int *fds, int count, int64_t deadline_ns)
{
    char byte;
    union {
        struct cmsghdr align;
        char space[CMSG_SPACE(2 * sizeof(int))];
    } control;
    struct iovec part = {&byte, 1};
    for (;;) {
        struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = control.space,
                                 .msg_controllen = sizeof control.space};
        ssize_t n = recvmsg(socket_fd, &message, MSG_CMSG_CLOEXEC);
        if (n == 1) {
            const struct cmsghdr *header = CMSG_FIRSTHDR(&message);
            const bool has_fds = header && header->cmsg_type == SCM_RIGHTS;
            const size_t nbytes = has_fds ? header->cmsg_len - CMSG_LEN(0) : 0;
            if (nbytes <= (size_t)count * sizeof(int) && has_fds)
                memcpy(fds, CMSG_DATA(header), nbytes);         // the caller closes them on an error
            if (message.msg_flags & MSG_CTRUNC)
                return BHVD_ERR_SYSTEM;
            return has_fds && nbytes == (size_t)count * sizeof(int) ? BHVD_OK : BHVD_ERR_PEER_LOST;
        }
        if (n == 0 || (errno != EAGAIN && errno != EINTR) || socket_await(socket_fd, POLLIN, deadline_ns))
            return BHVD_ERR_PEER_LOST;
    }
}

static bhvd_status map_shm_segment(struct connecting *k)
{
    struct connections *c = k->c;
    size_t size = shm_segment_size(c->local_size);
    void *base = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, k->memory_fd, 0);
    if (base == MAP_FAILED)
        return error_set(k->error, BHVD_ERR_SYSTEM, "cannot map %zu bytes of shared memory: %s", size, strerror(errno));
    madvise(base, size, MADV_DONTDUMP);     // a core dump would read all of it, and so allocate pages that nobody has touched
    c->shm = (struct shm_segment){.base = base, .size = size, .ranks = c->local_size};
    c->owns_shm_segment = true;
    c->doorbell.word = shm_segment_doorbell(&c->shm, c->local_index);
    return BHVD_OK;
}

bhvd_status local_make_memory(struct connecting *k)
{
    size_t size = shm_segment_size(k->c->local_size);
    k->memory_fd = memfd_create("bagua_hvd", MFD_CLOEXEC | MFD_NOEXEC_SEAL);     // required where vm.memfd_noexec is 2
    if (k->memory_fd < 0 && errno == EINVAL)                                     // before Linux 6.3
        k->memory_fd = memfd_create("bagua_hvd", MFD_CLOEXEC);
    if (k->memory_fd < 0 || ftruncate(k->memory_fd, (off_t)size) != 0)
        return error_set(k->error, BHVD_ERR_SYSTEM, "cannot make %zu bytes of shared memory: %s", size,
                         strerror(errno));
    return map_shm_segment(k);
}

// Gives the link to `peer`, with index `local_index` on this host, its rings and doorbell; doorbell_fd then belongs to the link.
static void use_rings(struct connections *c, int peer, int local_index, int doorbell_fd)
{
    struct link *link = &c->links[peer];
    link->local_index = local_index;
    link->doorbell = (struct doorbell){shm_segment_doorbell(&c->shm, local_index), doorbell_fd};
    link->control = (struct channel){
        .ops = &channel_ring_ops, .fd = -1, .capacity = RING_CONTROL_BYTES, .peer_doorbell = &link->doorbell,
        .tx = shm_segment_control_ring(&c->shm, c->local_index, local_index),
        .rx = shm_segment_control_ring(&c->shm, local_index, c->local_index)};
    link->data_channels[0].channel = (struct channel){
        .ops = &channel_ring_ops, .fd = -1, .capacity = RING_DATA_BYTES, .peer_doorbell = &link->doorbell,
        .tx = shm_segment_data_ring(&c->shm, c->local_index, local_index),
        .rx = shm_segment_data_ring(&c->shm, local_index, c->local_index)};
}

static int local_index_of(const struct connecting *k, int rank)
{
    int index = 0;
    for (int i = 0; i < rank; i++)
        index += connecting_shares_memory(k, i);
    return index;
}

bhvd_status local_join(struct connecting *k, int rank, int fd, int64_t deadline_ns)
{
    struct connections *c = k->c;
    int index = local_index_of(k, rank), received[2] = {-1, -1}, sent[2] = {c->doorbell.fd, k->memory_fd};
    int expects = index == 0 ? 2 : 1, sends = c->local_index == 0 ? 2 : 1;
    bhvd_status status = send_fds(fd, sent, sends, deadline_ns);
    if (!status)
        status = receive_fds(fd, received, expects, deadline_ns);
    if (status == BHVD_ERR_SYSTEM)
        error_set(k->error, status, "its descriptors cannot be taken: %s%s", strerror(EMFILE), socket_remedy(EMFILE));
    if (!status && expects == 2) {
        k->memory_fd = received[1];
        status = map_shm_segment(k);
    }
    if (status) {
        if (received[0] >= 0)
            close(received[0]);
        return status;
    }
    c->links[rank].liveness_fd = fd;
    use_rings(c, rank, index, received[0]);
    return BHVD_OK;
}

static bhvd_status connect_once(struct connecting *k, int rank)
{
    int fd = -1;
    bhvd_status status = open_socket(k, rank, &fd);
    if (!status)
        status = listener_handshake_local(k->c->listener, rank, fd, k->deadline_ns, k->error);
    if (!status)
        status = local_join(k, rank, fd, k->deadline_ns);
    if (!status)
        return BHVD_OK;
    if (fd >= 0)
        close(fd);
    const struct bhvd_error why = *k->error;
    return why.status ? error_set(k->error, status, "no connection to rank %d: %.900s", rank, why.message)
                      : error_set(k->error, status, "the connection to rank %d broke during setup", rank);
}

// Retries: a rank of this host that was flooded by strangers may have dropped this connection with theirs.
bhvd_status local_connect(struct connecting *k, int rank)
{
    for (;;) {
        bhvd_status status = connect_once(k, rank);
        if (status != BHVD_ERR_PEER_LOST || clock_remaining_ms(k->deadline_ns) == 0)
            return status;
        error_clear(k->error);
        poll(NULL, 0, CONNECTOR_RETRY_MS);
    }
}

// -------------------------------------------------------------------------------------------------------------- inproc

// The inproc transport: n ranks are n threads of one process, for tests. The "host memory" is anonymous memory.
struct inproc_world {
    struct shm_segment memory;
    int doorbell_fds[];         // by rank, duplicated into every link
};

void *bhvd_inproc_world_create(int size)
{
    if (size < 1)
        return NULL;
    struct inproc_world *world = calloc(1, sizeof *world + (size_t)size * sizeof(int));
    if (!world)
        return NULL;
    size_t bytes = shm_segment_size(size);
    void *base = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED) {
        free(world);
        return NULL;
    }
    world->memory = (struct shm_segment){.base = base, .size = bytes, .ranks = size};
    for (int i = 0; i < size; i++)
        world->doorbell_fds[i] = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    return world;
}

void bhvd_inproc_world_destroy(void *handle)
{
    struct inproc_world *world = handle;
    if (!world)
        return;
    for (int i = 0; i < world->memory.ranks; i++)
        close(world->doorbell_fds[i]);
    munmap(world->memory.base, world->memory.size);
    free(world);
}

bhvd_status inproc_connect(struct connections *c, void *handle, struct bhvd_error *error)
{
    struct inproc_world *world = handle;
    if (!world || world->memory.ranks != c->size)
        return error_set(error, BHVD_ERR_ARGUMENT, "transport \"inproc\" needs a world of %d ranks", c->size);
    c->shm = world->memory;
    c->local_index = c->rank;
    c->local_size = c->size;
    c->doorbell = (struct doorbell){shm_segment_doorbell(&c->shm, c->rank), dup(world->doorbell_fds[c->rank])};
    for (int peer = 0; peer < c->size; peer++) {
        if (peer != c->rank)
            use_rings(c, peer, peer, dup(world->doorbell_fds[peer]));
    }
    return BHVD_OK;
}
