// Links are opened for their first message, from either side, and in small jobs at the start; also connections to ranks that are
// gone, and from strangers.
#include <dirent.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/wait.h>

#define RANKS 9                         // more than in a small job

#include "base/clock.h"
#include "core/context/context.h"
#include "job.h"
#include "sockets.h"
#include "transport/connect.h"
#include "transport/listener.h"

enum { STEPS = 20, STRANGER_MS = 10000 };

static void meet(struct job *job, int nth)
{
    atomic_fetch_add(&job->ready, 1);
    while (atomic_load(&job->ready) < RANKS * nth)
        usleep(1000);
}

static struct link seen(bhvd_context *ctx, int rank)
{
    pthread_mutex_lock(&ctx->engine_lock);
    const struct link link = ctx->exec.connections.links[rank];
    pthread_mutex_unlock(&ctx->engine_lock);
    return link;
}

static void sum_of_ones(bhvd_context *ctx)
{
    float value = 1;
    finish(post_sum(ctx, "ones", &value, 1), BHVD_OK);
    CHECK(value == RANKS);
}

// Both connections are open, and have keep-alive set against firewalls.
static void check_open(const struct link link)
{
    CHECK(link.state == LINK_OPEN && !link.lacks_data_channels);
    const int fds[] = {link.control.fd, link.data_channels[0].channel.fd};
    for (int i = 0; i < 2; i++) {
        int is_kept_alive = 0;
        socklen_t size = sizeof is_kept_alive;
        CHECK(getsockopt(fds[i], SOL_SOCKET, SO_KEEPALIVE, &is_kept_alive, &size) == 0 && is_kept_alive);
    }
}

// As rank `caller`: BHVD_OK if the callee proves the secret, too.
static bhvd_status introduce(int fd, int caller, int callee, uint32_t channel)
{
    struct introduction introduction = {caller, channel, 1, {0}};
    unsigned char sent[BHVD_CHANNELS][BHVD_PROOF_BYTES], expected[BHVD_CHANNELS][BHVD_PROOF_BYTES];
    uint8_t proof[BHVD_PROOF_BYTES];
    prove(caller, callee, sent);
    prove(callee, caller, expected);
    memcpy(introduction.proof, sent[channel % BHVD_CHANNELS], sizeof introduction.proof);
    CHECK_STATUS(socket_write_at_once(fd, &introduction, sizeof introduction), BHVD_OK);
    const bhvd_status status = socket_read_full(fd, proof, sizeof proof, clock_deadline_ns(STRANGER_MS));
    return status || auth_matches(proof, expected[channel % BHVD_CHANNELS]) ? status : BHVD_ERR_AUTH;
}

static void opens_when_needed(struct job *job, int rank, bhvd_context *ctx)
{
    finish(post_barrier(ctx, "negotiates"), BHVD_OK);
    for (int other = 0; other < RANKS; other++) {
        const struct link link = seen(ctx, other);
        if (other == rank)
            continue;
        CHECK_EQ(link.state, rank && other ? LINK_UNCONNECTED : LINK_OPEN);
        CHECK(link.lacks_data_channels && link.data_channels[0].channel.fd < 0);
        CHECK_EQ(link.control.fd >= 0, link.state == LINK_OPEN);
    }
    meet(job, 1);
    for (int i = 0; i < STEPS; i++)
        sum_of_ones(ctx);
    check_open(seen(ctx, (rank + 1) % RANKS));
    check_open(seen(ctx, (rank + RANKS - 1) % RANKS));
    CHECK_EQ(seen(ctx, (rank + 4) % RANKS).lacks_data_channels, true);
    meet(job, 2);
}

TEST(links_are_opened_when_they_are_needed)
{
    run_job("tcp", "ring", NULL, opens_when_needed);
}

// Rank 2 cannot connect to rank 1; rank 0 learns of it from rank 2, and rank 1 from rank 0. All errors name the pair, the address
// and the system's reason; rank 1's does not say that rank 1 has been lost.
static void is_gone_when_needed(struct job *job, int rank, bhvd_context *ctx)
{
    struct bhvd_error error;
    float value = 1;
    finish(post_barrier(ctx, "negotiates"), BHVD_OK);
    if (rank == 1)
        connections_close(&ctx->exec.connections);
    meet(job, 1);
    bhvd_handle *handle = post_sum(ctx, "over all links", &value, 1);
    CHECK_STATUS(bhvd_wait(handle, 60000, &error), BHVD_ERR_PEER_LOST);
    const char *own = "the other ranks go on without rank 1: ";
    const char *why = error.message + (rank == 1 ? strlen(own) : 0);
    CHECK(rank != 1 || strncmp(error.message, own, strlen(own)) == 0);
    int port, said = 0;
    CHECK(sscanf(why, "no connection from rank 2 to rank 1: cannot connect to 127.0.0.1:%d: Connection refused. Rank 1 may have%n",
                 &port, &said) == 1 && said > 0);
    CHECK(error.rank == 1 && error.cause == BHVD_CAUSE_SILENT);
    bhvd_handle_drop(handle);
    meet(job, 2);
}

TEST(who_is_gone_when_a_link_is_opened_is_lost)
{
    run_job("tcp", "ring", NULL, is_gone_when_needed);
}

// Connections to rank 1 fail, but no rank needs one.
static void is_gone_when_nothing_is_to_be_sent(struct job *job, int rank, bhvd_context *ctx)
{
    finish(post_barrier(ctx, "negotiates"), BHVD_OK);
    if (rank == 1)
        connections_close(&ctx->exec.connections);
    meet(job, 1);
    if (rank == 2) {
        pthread_mutex_lock(&ctx->engine_lock);
        CHECK_STATUS(connections_open(&ctx->exec.connections, &ctx->exec.connections.links[1]), BHVD_OK);
        pthread_mutex_unlock(&ctx->engine_lock);
        while (seen(ctx, 1).opening)
            usleep(1000);
    }
    meet(job, 2);
    finish(post_barrier(ctx, "goes on"), BHVD_OK);
    meet(job, 3);
}

TEST(a_link_that_nobody_needs_may_fail_to_open)
{
    run_job("tcp", "ring", NULL, is_gone_when_nothing_is_to_be_sent);
}

// Only rank 0 has a link to rank 2, whose connections break: rank 0 tells the others.
static void dies_unconnected(struct job *job, int rank, bhvd_context *ctx)
{
    struct bhvd_error error;
    finish(post_barrier(ctx, "negotiates"), BHVD_OK);
    CHECK(rank == 0 || seen(ctx, rank == 2 ? 1 : 2).state == LINK_UNCONNECTED);
    bhvd_handle *handle = rank == 2 ? NULL : post_barrier(ctx, "one does not come");
    meet(job, 1);
    if (rank == 2) {
        shutdown(seen(ctx, 0).control.fd, SHUT_RDWR);
    } else {
        CHECK_STATUS(bhvd_wait(handle, 60000, &error), BHVD_ERR_PEER_LOST);
        CHECK(strcmp(error.message, "rank 2 was lost: its process ended or became unreachable without leaving the job") == 0);
        CHECK(error.rank == 2 && error.cause == BHVD_CAUSE_ENDED);
        bhvd_handle_drop(handle);
    }
    meet(job, 2);
}

TEST(who_is_not_connected_to_a_rank_that_dies_is_told)
{
    run_job("tcp", "", NULL, dies_unconnected);
}

// Two ranks need each other at the same time: the higher one always connects.
static void all_at_once(struct job *job, int rank, bhvd_context *ctx)
{
    (void)rank;
    meet(job, 1);
    sum_of_ones(ctx);
}

TEST(links_are_opened_from_both_sides_at_once)
{
    for (int i = 0; i < STEPS; i++)
        run_job("tcp", "ring", NULL, all_at_once);
}

// Rank 1 connects to rank 0, which responds to none of the connections.
TEST(streams_of_a_link_are_connected_at_the_same_time)
{
    struct bhvd_error error;
    struct link links[2];
    struct connections c = {.rank = 1, .size = 2, .links = links, .doorbell = {.fd = eventfd(0, EFD_CLOEXEC)}};
    int fd, port;
    CHECK_STATUS(socket_listen("127.0.0.1", 0, 0, &fd, &port, &error), BHVD_OK);
    const struct endpoint endpoints[2] = {{.host = "127.0.0.1", .port = port}};
    const struct bhvd_proofs proofs[2] = {0};
    link_init(&links[0], 0, &c.started);
    links[0].data_channel_count = LINK_DATA_CHANNELS_MAX;
    links[0].lacks_data_channels = true;
    CHECK_STATUS(listener_create(&(struct listener_options){
        .rank = 1, .size = 2, .tcp_listen_fd = -1, .local_listen_fd = -1, .endpoints = endpoints, .proofs = proofs,
        .doorbell_fd = c.doorbell.fd, .connect_ms = STRANGER_MS, .open_ms = STRANGER_MS}, &c.listener, &error), BHVD_OK);
    CHECK_STATUS(connections_open(&c, &links[0]), BHVD_OK);
    int data_channels[LINK_DATA_CHANNELS_MAX];
    for (int i = 0; i < LINK_DATA_CHANNELS_MAX; i++) {
        CHECK_STATUS(socket_await(fd, POLLIN, clock_deadline_ns(STRANGER_MS)), BHVD_OK);
        CHECK_STATUS(socket_accept(fd, &data_channels[i]), BHVD_OK);
    }
    listener_destroy(c.listener);
    for (int i = 0; i < LINK_DATA_CHANNELS_MAX; i++)
        close(data_channels[i]);
    close(fd);
    close(c.doorbell.fd);
}

// ------------------------------------------------------------------------------------------------------------------- threads

enum { MANY = 20, FEW = 3 };

struct many {
    struct gathering gathering;
    _Atomic int ready, done;
};

struct one_of_many {
    struct many *all;
    int rank;
    pthread_t thread;
};

static bhvd_context *create(const struct one_of_many *one, int size)
{
    char host[32];
    snprintf(host, sizeof host, "host %d", one->rank);
    const struct bhvd_context_options options = {
        .rank = one->rank, .size = size, .transport = "tcp", .gather = gather,
        .user = &(struct gatherer){&one->all->gathering, one->rank, size}, .listen_host = "127.0.0.1", .host_id = host,
        .fusion_threshold = 1 << 20, .cache_capacity = 16, .start_timeout_ms = 60000,
        .timeout_ms = 60000};
    struct bhvd_error error;
    bhvd_context *ctx;
    CHECK_STATUS(bhvd_context_create(&options, &ctx, &error), BHVD_OK);
    return ctx;
}

static void begin(struct many *all, struct one_of_many *ranks, int size, void *(*body)(void *))
{
    for (int rank = 0; rank < size; rank++) {
        ranks[rank] = (struct one_of_many){.all = all, .rank = rank};
        CHECK_EQ(pthread_create(&ranks[rank].thread, NULL, body, &ranks[rank]), 0);
    }
}

static void end(struct one_of_many *ranks, int size)
{
    for (int rank = 0; rank < size; rank++)
        pthread_join(ranks[rank].thread, NULL);
}

static void *await_links(void *arg)
{
    struct one_of_many *one = arg;
    bhvd_context *ctx = create(one, FEW);
    const int64_t deadline_ns = clock_deadline_ns(STRANGER_MS);
    for (int other = 0; other < FEW; other++) {
        while (seen(ctx, other).lacks_data_channels && clock_remaining_ms(deadline_ns))
            usleep(1000);
        if (other != one->rank)
            check_open(seen(ctx, other));
    }
    one->all->done++;
    while (one->all->done < FEW)
        usleep(1000);
    bhvd_context_destroy(ctx);
    return NULL;
}

TEST(a_small_job_opens_all_links_at_the_start)
{
    struct many all = {0};
    struct one_of_many ranks[FEW];
    begin(&all, ranks, FEW, await_links);
    end(ranks, FEW);
}

static int entry_count(const char *path)
{
    int count = 0;
    DIR *entries = opendir(path);
    while (readdir(entries))
        count++;
    closedir(entries);
    return count;
}

static void *exchange_with_all(void *arg)
{
    struct one_of_many *one = arg;
    bhvd_context *ctx = create(one, MANY);
    float values[MANY] = {0};
    one->all->ready++;
    while (one->all->ready <= MANY)
        usleep(1000);
    finish(post_floats(ctx, (struct bhvd_args){.kind = BHVD_ALLTOALL, .name = "all"}, values, NULL, MANY), BHVD_OK);
    one->all->done++;
    while (one->all->done < MANY)
        usleep(1000);
    bhvd_context_destroy(ctx);
    return NULL;
}

TEST(a_link_that_is_opened_takes_no_thread)
{
    struct many all = {0};
    struct one_of_many ranks[MANY];
    begin(&all, ranks, MANY, exchange_with_all);
    while (all.ready < MANY)
        usleep(1000);
    const int before = entry_count("/proc/self/task");
    int most = before;
    all.ready++;
    while (all.done < MANY) {
        const int count = entry_count("/proc/self/task");
        most = count > most ? count : most;
    }
    end(ranks, MANY);
    CHECK_EQ(most, before);
}

// --------------------------------------------------------------------------------------------------------------------- forks

// Three connections: an incoming one that is silent, one that waits to be taken, and an outgoing one to a silent listener.
TEST(a_forked_child_holds_no_connection_that_is_being_made)
{
    enum { TESTS = 3 };                     // descriptors at the other ends
    struct bhvd_error error;
    struct listener *listener;
    int own, own_port, silent, silent_port, fds[TESTS], doorbell = eventfd(0, EFD_CLOEXEC);
    const int64_t deadline_ns = clock_deadline_ns(STRANGER_MS);
    CHECK_STATUS(socket_listen("127.0.0.1", 0, 0, &own, &own_port, &error), BHVD_OK);
    CHECK_STATUS(socket_listen("127.0.0.1", 0, 0, &silent, &silent_port, &error), BHVD_OK);
    const struct endpoint endpoints[3] = {{.host = "127.0.0.1", .port = silent_port}};
    struct bhvd_proofs proofs[3] = {0};
    prove(1, 2, proofs[2].sent);
    prove(2, 1, proofs[2].received);
    const int before = entry_count("/proc/self/fd");
    CHECK_STATUS(listener_create(&(struct listener_options){
        .rank = 1, .size = 3, .tcp_listen_fd = own, .local_listen_fd = -1, .endpoints = endpoints, .proofs = proofs,
        .doorbell_fd = doorbell, .connect_ms = STRANGER_MS, .open_ms = STRANGER_MS}, &listener, &error), BHVD_OK);
    const int listening = entry_count("/proc/self/fd");
    CHECK_STATUS(listener_open(listener, 0, CHANNEL_CONTROL, 0), BHVD_OK);
    CHECK_STATUS(socket_await(silent, POLLIN, deadline_ns), BHVD_OK);
    CHECK_STATUS(socket_accept(silent, &fds[0]), BHVD_OK);
    CHECK_STATUS(socket_connect("127.0.0.1", own_port, deadline_ns, &fds[1], NULL), BHVD_OK);
    CHECK_STATUS(socket_connect("127.0.0.1", own_port, deadline_ns, &fds[2], NULL), BHVD_OK);
    CHECK_STATUS(introduce(fds[2], 2, 1, CHANNEL_CONTROL), BHVD_OK);
    while (!listener_has_arrivals(listener) || entry_count("/proc/self/fd") < listening + 2 * TESTS)
        usleep(1000);
    const pid_t child = fork();
    if (child == 0) {
        listener_after_fork(listener);
        CHECK_EQ(entry_count("/proc/self/fd"), before - 1 + TESTS);
        _exit(0);
    }
    int status;
    CHECK_EQ(waitpid(child, &status, 0), child);
    CHECK_EQ(status, 0);
    listener_destroy(listener);
    for (int i = 0; i < TESTS; i++)
        close(fds[i]);
    close(silent);
    close(doorbell);
}

// ------------------------------------------------------------------------------------------------------------------ versions

// Two ranks of this version and one of another.
static void *create_and_fail(void *arg)
{
    struct one_of_many *one = arg;
    const struct bhvd_context_options options = {
        .rank = one->rank, .size = 3, .transport = "tcp", .gather = gather,
        .user = &(struct gatherer){&one->all->gathering, one->rank, 3}, .listen_host = "127.0.0.1",
        .start_timeout_ms = 60000, .timeout_ms = 60000};
    struct bhvd_error error;
    bhvd_context *ctx;
    CHECK_STATUS(bhvd_context_create(&options, &ctx, &error), BHVD_ERR_MISMATCH);
    char expected[200];
    snprintf(expected, sizeof expected, "rank 0 runs bagua_hvd %s (protocol %d), but rank 2 runs 99.1 (protocol 77): install the same "
             "version on every host", bhvd_version(), ENDPOINT_PROTOCOL);
    CHECK_STR_EQ(error.message, expected);
    return NULL;
}

TEST(another_version_is_named_on_every_rank)
{
    struct many all = {0};
    struct one_of_many ranks[2];
    struct bhvd_proofs proofs[3];
    struct endpoint infos[3], mine = {.magic = ENDPOINT_MAGIC, .protocol = 77, .version = "99.1"};
    begin(&all, ranks, 2, create_and_fail);
    CHECK_STATUS(gather(&(struct gatherer){&all.gathering, 2, 3}, &mine, sizeof mine, infos, proofs, NULL), BHVD_OK);
    end(ranks, 2);
}

// ---------------------------------------------------------------------------------------------------------------- strangers

static int next_listener(int fd)
{
    for (; fd < 256; fd++) {
        struct sockaddr_in address;
        socklen_t size = sizeof address, word = sizeof(int);
        int listens = 0;
        if (getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listens, &word) == 0 && listens &&
            getsockname(fd, (struct sockaddr *)&address, &size) == 0 && address.sin_family == AF_INET)
            return fd;
    }
    return -1;
}

static int port_of(int listener)
{
    struct sockaddr_in address;
    socklen_t size = sizeof address;
    CHECK_EQ(getsockname(listener, (struct sockaddr *)&address, &size), 0);
    return ntohs(address.sin_port);
}

static int knock(int listener)
{
    int fd;
    CHECK_STATUS(socket_connect("127.0.0.1", port_of(listener), clock_deadline_ns(STRANGER_MS), &fd, NULL), BHVD_OK);
    return fd;
}

static void expect_hang_up(int fd)
{
    char byte;
    CHECK_STATUS(socket_read_full(fd, &byte, 1, clock_deadline_ns(STRANGER_MS)), BHVD_ERR_PEER_LOST);
    close(fd);
}

static int rank_at(int port, const struct job *job)
{
    int rank = 0;
    while (((const struct endpoint *)(const void *)job->gathering.endpoints[rank])->port != port)
        rank++;
    return rank;
}

static void bother_everyone(const struct job *job)
{
    int listeners = 0;
    for (int listener = 0; (listener = next_listener(listener)) >= 0; listener++, listeners++) {
        const int callee = rank_at(port_of(listener), job);
        int fd = knock(listener);
        char garbage[64] = "GET / HTTP/1.0";
        CHECK_STATUS(socket_write_full(fd, garbage, sizeof garbage, clock_deadline_ns(STRANGER_MS)), BHVD_OK);
        expect_hang_up(fd);
        fd = knock(listener);
        const struct introduction without_proof = {RANKS - 1, CHANNEL_DATA, 1, {0}};
        CHECK_STATUS(socket_write_full(fd, &without_proof, sizeof without_proof, clock_deadline_ns(STRANGER_MS)), BHVD_OK);
        expect_hang_up(fd);
        // These know the secret, but the rank does not expect them: no higher rank, no such channel, or one that it has already, as if
        // somebody repeated an introduction.
        const struct {
            int caller;
            uint32_t channel;
        } names[] = {{0, CHANNEL_CONTROL}, {RANKS, CHANNEL_CONTROL}, {-1, CHANNEL_DATA}, {RANKS - 1, 99}, {RANKS - 1, CHANNEL_LOCAL},
                     {RANKS - 1, CHANNEL_DATA + 1}, {callee ? 0 : RANKS - 1, CHANNEL_CONTROL}};
        for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
            fd = knock(listener);
            CHECK_STATUS(introduce(fd, names[i].caller, callee, names[i].channel), BHVD_ERR_PEER_LOST);
            close(fd);
        }
    }
    CHECK_EQ(listeners, RANKS);
}

static void goes_on_among_strangers(struct job *job, int rank, bhvd_context *ctx)
{
    meet(job, 1);
    if (rank == 0)
        bother_everyone(job);
    meet(job, 2);
    sum_of_ones(ctx);
}

TEST(strangers_at_a_running_job_change_nothing)
{
    run_job("tcp", "ring", NULL, goes_on_among_strangers);
}
