#include "check.h"

#include <arpa/inet.h>
#include <dirent.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include "base/bytes.h"
#include "base/clock.h"
#include "transport/auth.h"
#include "transport/rendezvous.h"
#include "transport/rendezvous_wire.h"
#include "transport/socket.h"

enum { LIMIT_MS = 20000, QUICK_MS = 4000 };     // QUICK_MS: far below every limit of the server, far above delays of a busy machine

static const char secret[] = "the job's secret";

static bhvd_rendezvous *start(void)
{
    bhvd_rendezvous *server;
    struct bhvd_error error;
    bhvd_status status = bhvd_rendezvous_create("127.0.0.1", 0, 0, secret, sizeof secret, &server, &error);
    if (status)
        fprintf(stderr, "%s\n", error.message);
    CHECK_STATUS(status, BHVD_OK);
    return server;
}

// ------------------------------------------------------------------------------------------ ranks as threads ----

struct rank {
    int port, rank, size, timeout_ms;
    const char *scope, *secret;
    uint32_t salt;              // makes a job's blobs unique
    uint32_t blob_size;
    bhvd_status status;
    struct bhvd_error error;
    pthread_t thread;
};

static void fill_blob(struct rendezvous_blob *blob, uint32_t salt, int rank, uint32_t size)
{
    blob->size = size;
    for (uint32_t i = 0; i < size; i++)
        blob->data[i] = (unsigned char)(salt + 31 * rank + i * 7);
}

static void *run_rank(void *arg)
{
    struct rank *r = arg;
    struct rendezvous_address address = {"127.0.0.1", r->port, r->secret, strlen(r->secret) + 1};
    struct rendezvous_blob mine, *all = calloc(r->size, sizeof *all), *expected = malloc(sizeof *expected);
    CHECK(all && expected);
    fill_blob(&mine, r->salt, r->rank, r->blob_size + r->rank);
    r->status = rendezvous_exchange(&address, r->scope, r->rank, r->size, &mine, all, clock_deadline_ns(r->timeout_ms),
                                    &r->error);
    CHECK_EQ(r->error.status, r->status);
    CHECK_EQ(r->error.message[0] == '\0', r->status == BHVD_OK);
    if (r->status == BHVD_OK)
        for (int i = 0; i < r->size; i++) {
            fill_blob(expected, r->salt, i, r->blob_size + i);
            CHECK_EQ(all[i].size, expected->size);
            CHECK_MEM_EQ(all[i].data, expected->data, expected->size);
        }
    free(all);
    free(expected);
    return NULL;
}

static void rank_start(struct rank *r)
{
    CHECK_EQ(pthread_create(&r->thread, NULL, run_rank, r), 0);
}

static int open_descriptors(void)
{
    DIR *folder = opendir("/proc/self/fd");
    CHECK(folder);
    int count = 0;
    while (readdir(folder))
        count++;
    closedir(folder);
    return count;
}

// A rank may have its reply slightly before the server closes the connection.
static int open_descriptors_settled(int expected_max)
{
    int64_t begin = check_now_ms();
    while (open_descriptors() > expected_max && check_now_ms() - begin < QUICK_MS)
        poll(NULL, 0, 5);
    return open_descriptors();
}

// Starts ranks that must wait for others; returns when the server has accepted them, and had time to read their requests. before:
// the number of descriptors that are open without ranks.
static void ranks_start_waiting(struct rank *ranks, int count, int before)
{
    CHECK_EQ(open_descriptors_settled(before), before);
    for (int i = 0; i < count; i++)
        rank_start(&ranks[i]);
    while (open_descriptors() < before + 2 * count)         // both ends of each connection
        poll(NULL, 0, 5);
    poll(NULL, 0, 300);
}

static void ranks_join(struct rank *ranks, int count)
{
    for (int i = 0; i < count; i++)
        pthread_join(ranks[i].thread, NULL);
}

static struct rank rank_of(const bhvd_rendezvous *server, const char *scope, int rank, int size)
{
    return (struct rank){.port = bhvd_rendezvous_port(server), .rank = rank, .size = size, .timeout_ms = LIMIT_MS,
                         .scope = scope, .secret = secret, .blob_size = 20};
}

// Runs a complete, correct job.
static void run_job(const bhvd_rendezvous *server, const char *scope, int size, uint32_t blob_size)
{
    enum { MAX = 64 };
    struct rank ranks[MAX];
    CHECK(size <= MAX);
    int64_t begin = check_now_ms();
    for (int i = 0; i < size; i++) {
        ranks[i] = rank_of(server, scope, i, size);
        ranks[i].salt = (uint32_t)begin;
        ranks[i].blob_size = blob_size;
        rank_start(&ranks[i]);
    }
    ranks_join(ranks, size);
    for (int i = 0; i < size; i++) {
        if (ranks[i].status)
            fprintf(stderr, "rank %d: %s\n", i, ranks[i].error.message);
        CHECK_STATUS(ranks[i].status, BHVD_OK);
    }
}

// The same while other peers are idle or slow: it does not wait until the server drops them.
static void run_job_at_once(const bhvd_rendezvous *server, const char *scope, int size, uint32_t blob_size)
{
    int64_t begin = check_now_ms();
    run_job(server, scope, size, blob_size);
    CHECK(check_now_ms() - begin < QUICK_MS);
}

TEST(every_rank_gets_all_blobs_in_rank_order)
{
    bhvd_rendezvous *server = start();
    static const int sizes[] = {1, 2, 3, 5, 8, 64};
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        run_job(server, "init.0", sizes[i], 0);
        run_job(server, "init.0", sizes[i], RENDEZVOUS_BLOB_MAX - sizes[i]);
    }
    bhvd_rendezvous_destroy(server);
}

TEST(one_scope_name_serves_again_and_again)
{
    bhvd_rendezvous *server = start();
    for (int i = 0; i < 50; i++)
        run_job(server, "init.0", 3, 10);
    bhvd_rendezvous_destroy(server);
}

TEST(many_scopes_at_once_do_not_mix)
{
    enum { SCOPES = 40, SIZE = 3 };
    bhvd_rendezvous *server = start();
    static struct rank ranks[SCOPES][SIZE];
    static char names[SCOPES][RENDEZVOUS_SCOPE_MAX + 1];
    for (int s = 0; s < SCOPES; s++)
        snprintf(names[s], sizeof names[s], "%0*d", s % 2 ? RENDEZVOUS_SCOPE_MAX : 5, s);
    for (int r = 0; r < SIZE; r++)
        for (int s = 0; s < SCOPES; s++) {
            ranks[s][r] = rank_of(server, names[s], r, SIZE);
            ranks[s][r].salt = s;
            rank_start(&ranks[s][r]);
        }
    for (int s = 0; s < SCOPES; s++) {
        ranks_join(ranks[s], SIZE);
        for (int r = 0; r < SIZE; r++)
            CHECK_STATUS(ranks[s][r].status, BHVD_OK);
    }
    bhvd_rendezvous_destroy(server);
}

TEST(ranks_may_come_before_the_server)
{
    bhvd_rendezvous *server = start();
    int port = bhvd_rendezvous_port(server);
    struct rank ranks[2] = {rank_of(server, "s", 0, 2), rank_of(server, "s", 1, 2)};
    bhvd_rendezvous_destroy(server);
    rank_start(&ranks[0]);
    rank_start(&ranks[1]);
    poll(NULL, 0, 100);
    CHECK_STATUS(bhvd_rendezvous_create("127.0.0.1", port, port, secret, sizeof secret, &server, NULL), BHVD_OK);
    ranks_join(ranks, 2);
    CHECK_STATUS(ranks[0].status, BHVD_OK);
    CHECK_STATUS(ranks[1].status, BHVD_OK);
    bhvd_rendezvous_destroy(server);
}

// --------------------------------------------------------------------------------------------------- failures ----

TEST(missing_ranks_are_named)
{
    bhvd_rendezvous *server = start();
    struct rank ranks[2] = {rank_of(server, "init.0", 0, 4), rank_of(server, "init.0", 1, 4)};
    for (int i = 0; i < 2; i++) {
        ranks[i].timeout_ms = 2500;
        rank_start(&ranks[i]);
    }
    ranks_join(ranks, 2);
    for (int i = 0; i < 2; i++) {
        CHECK_STATUS(ranks[i].status, BHVD_ERR_TIMEOUT);
        CHECK_STR_EQ(ranks[i].error.message, "ranks 2, 3 of 4 did not arrive within 2.5 s (HOROVOD_START_TIMEOUT; scope init.0)");
    }

    struct rank one = rank_of(server, "init.1", 0, 2);
    one.timeout_ms = 1000;
    run_rank(&one);
    CHECK_STR_EQ(one.error.message, "rank 1 of 2 did not arrive within 1 s (HOROVOD_START_TIMEOUT; scope init.1)");

    one = rank_of(server, "init.2", 3, 16384);
    one.timeout_ms = 1000;
    run_rank(&one);
    CHECK_STR_CONTAINS(one.error.message, "ranks 0, 1, 2, 4, 5, 6, 7, 8 and 16375 more of 16384 did not arrive within");
    run_job(server, "init.0", 4, 10);
    bhvd_rendezvous_destroy(server);
}

TEST(the_first_that_ended_is_named)
{
    bhvd_rendezvous *server = start();
    bhvd_rendezvous_rank_ended(server, "", 1, 0);
    bhvd_rendezvous_rank_ended(server, "", 0, 1);       // had received rank 1's request
    struct rank late = rank_of(server, "init.1", 2, 3);
    run_rank(&late);
    CHECK_STATUS(late.status, BHVD_ERR_PEER_LOST);
    CHECK_STR_EQ(late.error.message, "rank 1 of 3 has ended, with exit code 0, and did not come to init() (scope init.1)");
    bhvd_rendezvous_destroy(server);
}

TEST(an_end_in_another_scope_is_none_here)
{
    bhvd_rendezvous *server = start();
    bhvd_rendezvous_rank_ended(server, "elastic.1", 1, 137);
    run_job(server, "elastic.2", 2, 10);
    struct rank late = rank_of(server, "elastic.1", 0, 2);
    run_rank(&late);
    CHECK_STATUS(late.status, BHVD_ERR_PEER_LOST);
    CHECK_STR_CONTAINS(late.error.message, "rank 1 of 2 has ended, with exit code 137");
    bhvd_rendezvous_destroy(server);
}

TEST(a_disagreement_is_told_to_every_rank)
{
    bhvd_rendezvous *server = start();
    const int before = open_descriptors();
    struct { int rank, size; const char *part; } intruders[] = {
        {2, 4, "rank 2 counts 4 ranks in the job, others count 3 (scope s)"},
        {1, 3, "two processes say they are rank 1 of 3 (scope s): one that a rank starts and that calls init() itself must not "
               "inherit HOROVOD_RANK and HOROVOD_SIZE"},
    };
    for (int i = 0; i < 2; i++) {
        struct rank ranks[3] = {rank_of(server, "s", 0, 3), rank_of(server, "s", 1, 3),
                                rank_of(server, "s", intruders[i].rank, intruders[i].size)};
        ranks_start_waiting(ranks, 2, before);
        rank_start(&ranks[2]);
        ranks_join(ranks, 3);
        for (int r = 0; r < 3; r++) {
            CHECK_STATUS(ranks[r].status, BHVD_ERR_MISMATCH);
            CHECK_STR_EQ(ranks[r].error.message, intruders[i].part);
        }
        run_job(server, "s", 3, 10);
    }
    bhvd_rendezvous_destroy(server);
}

TEST(a_wrong_secret_is_named)
{
    bhvd_rendezvous *server = start();
    struct rank r = rank_of(server, "s", 0, 1);
    r.secret = "an older job's secret";
    int64_t begin = check_now_ms();
    run_rank(&r);
    CHECK_STATUS(r.status, BHVD_ERR_AUTH);
    CHECK_STR_CONTAINS(r.error.message, "_HOROVOD_SECRET_KEY");
    CHECK_STR_CONTAINS(r.error.message, "secret differs");
    CHECK_STR_CONTAINS(r.error.message, "127.0.0.1:");
    CHECK(check_now_ms() - begin < QUICK_MS);
    run_job(server, "s", 2, 10);
    bhvd_rendezvous_destroy(server);
}

TEST(nobody_listening_is_named_at_the_deadline)
{
    bhvd_rendezvous *server = start();
    struct rank r = rank_of(server, "s", 0, 1);
    bhvd_rendezvous_destroy(server);
    char where[64];
    snprintf(where, sizeof where, "no rendezvous server answered at 127.0.0.1:%d within 0.3 s", r.port);
    r.timeout_ms = 300;
    int64_t begin = check_now_ms();
    run_rank(&r);
    CHECK_STATUS(r.status, BHVD_ERR_SYSTEM);
    CHECK_STR_CONTAINS(r.error.message, where);
    CHECK(check_now_ms() - begin >= 300 && check_now_ms() - begin < QUICK_MS);
}

// A listener that accepts and sends nothing.
TEST(a_silent_server_ends_at_the_deadline)
{
    int fd, port;
    CHECK_STATUS(socket_listen("127.0.0.1", 0, 0, &fd, &port, NULL), BHVD_OK);
    struct rank r = {.port = port, .size = 1, .timeout_ms = 300, .scope = "s", .secret = secret};
    run_rank(&r);
    CHECK_STATUS(r.status, BHVD_ERR_TIMEOUT);
    CHECK_STR_CONTAINS(r.error.message, "rendezvous server at 127.0.0.1:");
    close(fd);
}

TEST(a_port_in_use_is_named)
{
    bhvd_rendezvous *server = start(), *second = server;
    struct bhvd_error error;
    char expected[128];
    int port = bhvd_rendezvous_port(server);
    CHECK_STATUS(bhvd_rendezvous_create("127.0.0.1", port, port, secret, sizeof secret, &second, &error), BHVD_ERR_SYSTEM);
    CHECK(!second);
    snprintf(expected, sizeof expected, "cannot listen on 127.0.0.1:%d: no port of BAGUA_HVD_PORTS is free: widen the range or unset it", port);
    CHECK_STR_EQ(error.message, expected);
    CHECK_STATUS(bhvd_rendezvous_create("127.0.0.1", 0, 0, "", 0, &second, &error), BHVD_ERR_ARGUMENT);
    CHECK_STATUS(bhvd_rendezvous_create("node7", 0, 0, secret, sizeof secret, &second, &error), BHVD_ERR_ARGUMENT);
    bhvd_rendezvous_destroy(server);
    bhvd_rendezvous_destroy(NULL);
}

TEST(wrong_arguments_are_found_before_connecting)
{
    struct rendezvous_address address = {"127.0.0.1", 1, secret, sizeof secret};
    struct rendezvous_blob mine = {.size = 0}, all[1];
    struct bhvd_error error;
    char scope[RENDEZVOUS_SCOPE_MAX + 2];
    memset(scope, 'x', sizeof scope - 1);
    scope[sizeof scope - 1] = '\0';
    int64_t never = CLOCK_NEVER;
    CHECK_STATUS(rendezvous_exchange(&address, "s", 0, 0, &mine, all, never, &error), BHVD_ERR_ARGUMENT);
    CHECK_STATUS(rendezvous_exchange(&address, "s", 1, 1, &mine, all, never, &error), BHVD_ERR_ARGUMENT);
    CHECK_STATUS(rendezvous_exchange(&address, "s", -1, 1, &mine, all, never, &error), BHVD_ERR_ARGUMENT);
    CHECK_STATUS(rendezvous_exchange(&address, "s", 0, 16385, &mine, all, never, NULL), BHVD_ERR_ARGUMENT);
    CHECK_STATUS(rendezvous_exchange(&address, "", 0, 1, &mine, all, never, &error), BHVD_ERR_ARGUMENT);
    CHECK_STATUS(rendezvous_exchange(&address, scope, 0, 1, &mine, all, never, &error), BHVD_ERR_ARGUMENT);
    address.host = "localhost";
    CHECK_STATUS(rendezvous_exchange(&address, "s", 0, 1, &mine, all, never, &error), BHVD_ERR_ARGUMENT);
    CHECK_STR_CONTAINS(error.message, "numeric");
    mine.size = RENDEZVOUS_BLOB_MAX + 1;
    CHECK_STATUS(rendezvous_exchange(&address, "s", 0, 1, &mine, all, never, &error), BHVD_ERR_ARGUMENT);
}

TEST(destroy_does_not_wait_for_waiting_ranks)
{
    bhvd_rendezvous *server = start();
    struct rank ranks[2] = {rank_of(server, "s", 0, 3), rank_of(server, "s", 2, 3)};
    ranks_start_waiting(ranks, 2, open_descriptors());
    int64_t begin = check_now_ms();
    bhvd_rendezvous_destroy(server);
    ranks_join(ranks, 2);
    CHECK(check_now_ms() - begin < QUICK_MS);
    for (int i = 0; i < 2; i++) {
        CHECK_STATUS(ranks[i].status, BHVD_ERR_PEER_LOST);
        CHECK_STR_CONTAINS(ranks[i].error.message, "closed the connection before all ranks had arrived");
    }
}

// ------------------------------------------------------------------------------------------------ hostile input ----

static int attach(const bhvd_rendezvous *server)
{
    int fd;
    CHECK_STATUS(socket_connect("127.0.0.1", bhvd_rendezvous_port(server), clock_deadline_ns(QUICK_MS), &fd, NULL),
                 BHVD_OK);
    return fd;
}

// The binding that a connecting rank expects of the server.
static struct auth_binding binding_to(const bhvd_rendezvous *server)
{
    return (struct auth_binding){AUTH_RENDEZVOUS, 0, AUTH_NO_RANK, bhvd_rendezvous_port(server)};
}

static int attach_authenticated(const bhvd_rendezvous *server)
{
    int fd = attach(server);
    const struct auth_binding binding = binding_to(server);
    CHECK_STATUS(auth_handshake(fd, AUTH_CONNECTED, &binding, secret, sizeof secret, clock_deadline_ns(QUICK_MS), NULL), BHVD_OK);
    return fd;
}

// Sending to a connection that is being closed may fail, which is intended.
static void send_what_goes(int fd, const void *data, size_t size)
{
    socket_write_full(fd, data, size, clock_deadline_ns(QUICK_MS));
}

static void check_closed_within(int fd, int limit_ms)
{
    unsigned char byte;
    int64_t deadline_ns = clock_deadline_ns(limit_ms);
    bhvd_status status;
    while (!(status = socket_read_full(fd, &byte, 1, deadline_ns)))
        ;
    CHECK_STATUS(status, BHVD_ERR_PEER_LOST);
    close(fd);
}

TEST(random_bytes_are_dropped)
{
    bhvd_rendezvous *server = start();
    unsigned seed = 20240607;
    unsigned char bytes[2048];
    for (int i = 0; i < 300; i++) {
        int fd = attach(server);
        size_t size = (size_t)rand_r(&seed) % sizeof bytes;
        for (size_t k = 0; k < size; k++)
            bytes[k] = (unsigned char)rand_r(&seed);
        if (i % 2)          // passes the check of the magic number
            memcpy(bytes, "BHVD\1\0\0\0", 8);
        send_what_goes(fd, bytes, size);
        if (size >= AUTH_HELLO_SIZE + AUTH_PROOF_SIZE)
            check_closed_within(fd, QUICK_MS);
        else
            close(fd);
        if (i % 100 == 0)
            run_job(server, "s", 5, 10);
    }
    run_job(server, "s", 5, 10);
    bhvd_rendezvous_destroy(server);
}

// A correct message of an authenticated rank of size 1, truncated at every length.
TEST(truncated_requests_leave_nothing_behind)
{
    bhvd_rendezvous *server = start();
    struct bytes message = {0};
    struct rendezvous_request request = {.rank = 0, .size = 2, .respond_within_ms = 60000, .limit_ms = 60000,
                                         .scope_size = 1, .blob_size = 5};
    rendezvous_request_put(&message, &request);
    bytes_put(&message, "s", 1);
    bytes_put(&message, "hello", 5);
    for (size_t cut = 0; cut <= message.size; cut++) {      // the last one is complete, waits, and breaks
        int fd = attach_authenticated(server);
        send_what_goes(fd, message.data, cut);
        close(fd);
    }
    run_job(server, "s", 2, 10);
    bytes_fini(&message);
    bhvd_rendezvous_destroy(server);
}

TEST(lengths_out_of_bounds_are_dropped)
{
    static const struct rendezvous_request requests[] = {
        {.size = 0, .scope_size = 1},
        {.size = RENDEZVOUS_SIZE_MAX + 1, .scope_size = 1},
        {.size = UINT32_MAX, .rank = UINT32_MAX, .scope_size = 1},
        {.size = 1, .scope_size = 0},
        {.size = 1, .scope_size = RENDEZVOUS_SCOPE_MAX + 1},
        {.size = 1, .scope_size = UINT32_MAX},
        {.size = 1, .scope_size = 1, .blob_size = RENDEZVOUS_BLOB_MAX + 1},
        {.size = 1, .scope_size = 1, .blob_size = UINT32_MAX},
        {.size = 1, .scope_size = UINT32_MAX, .blob_size = 2},
    };
    bhvd_rendezvous *server = start();
    for (size_t i = 0; i < sizeof requests / sizeof requests[0]; i++) {
        struct bytes message = {0};
        int fd = attach_authenticated(server);
        rendezvous_request_put(&message, &requests[i]);
        send_what_goes(fd, message.data, message.size);
        bytes_fini(&message);
        check_closed_within(fd, QUICK_MS);
    }

    // Not a request; then a name that does not fit into a C string.
    int fd = attach_authenticated(server);
    unsigned char zeros[REQUEST_HEAD_SIZE] = {0};
    send_what_goes(fd, zeros, sizeof zeros);
    check_closed_within(fd, QUICK_MS);
    fd = attach_authenticated(server);
    struct bytes message = {0};
    rendezvous_request_put(&message, &(struct rendezvous_request){.size = 1, .scope_size = 3});
    bytes_put(&message, "a\0b", 3);
    send_what_goes(fd, message.data, message.size);
    bytes_fini(&message);
    check_closed_within(fd, QUICK_MS);
    run_job(server, "s", 5, 10);
    bhvd_rendezvous_destroy(server);
}

// The client rejects such a rank itself, so the test sends raw bytes.
TEST(a_rank_beyond_the_size_is_a_disagreement)
{
    bhvd_rendezvous *server = start();
    struct rank waiting = rank_of(server, "s", 0, 2);
    ranks_start_waiting(&waiting, 1, open_descriptors());
    int fd = attach_authenticated(server);
    struct bytes message = {0};
    rendezvous_request_put(&message, &(struct rendezvous_request){.rank = 2, .size = 2, .respond_within_ms = 60000,
                                                                  .scope_size = 1});
    bytes_put(&message, "s", 1);
    send_what_goes(fd, message.data, message.size);
    bytes_fini(&message);
    ranks_join(&waiting, 1);
    CHECK_STATUS(waiting.status, BHVD_ERR_MISMATCH);
    CHECK_STR_EQ(waiting.error.message, "a process says it is rank 2 of 2; ranks are 0 to 1 (scope s)");
    check_closed_within(fd, QUICK_MS);
    bhvd_rendezvous_destroy(server);
}

TEST(a_replayed_handshake_is_dropped)
{
    bhvd_rendezvous *server = start();
    struct auth auth;
    uint8_t hello[AUTH_HELLO_SIZE], proof[AUTH_PROOF_SIZE];
    int64_t deadline_ns = clock_deadline_ns(QUICK_MS);

    // The messages that an observer of a successful handshake has seen.
    int fd = attach(server);
    const struct auth_binding binding = binding_to(server);
    CHECK_STATUS(auth_begin(&auth, AUTH_CONNECTED, &binding, NULL), BHVD_OK);
    CHECK_STATUS(socket_write_full(fd, auth.hello, sizeof auth.hello, deadline_ns), BHVD_OK);
    CHECK_STATUS(socket_read_full(fd, hello, sizeof hello, deadline_ns), BHVD_OK);
    CHECK_STATUS(auth_receive_hello(&auth, hello, secret, sizeof secret, NULL), BHVD_OK);
    CHECK_STATUS(socket_write_full(fd, auth.proof, sizeof auth.proof, deadline_ns), BHVD_OK);
    CHECK_STATUS(socket_read_full(fd, proof, sizeof proof, deadline_ns), BHVD_OK);
    CHECK_STATUS(auth_receive_proof(&auth, proof, NULL), BHVD_OK);
    struct bytes request = {0};
    rendezvous_request_put(&request, &(struct rendezvous_request){.size = 1, .scope_size = 1, .respond_within_ms = 1000});
    bytes_put(&request, "s", 1);
    CHECK_STATUS(socket_write_full(fd, request.data, request.size, deadline_ns), BHVD_OK);
    uint8_t reply[REPLY_HEAD_SIZE];
    CHECK_STATUS(socket_read_full(fd, reply, sizeof reply, deadline_ns), BHVD_OK);      // so the handshake succeeded
    close(fd);

    fd = attach(server);
    send_what_goes(fd, auth.hello, sizeof auth.hello);
    send_what_goes(fd, auth.proof, sizeof auth.proof);
    send_what_goes(fd, request.data, request.size);
    check_closed_within(fd, QUICK_MS);

    // The server's own bytes, sent back to it.
    fd = attach(server);
    send_what_goes(fd, auth.hello, sizeof auth.hello);
    CHECK_STATUS(socket_read_full(fd, hello, sizeof hello, deadline_ns), BHVD_OK);
    CHECK_STATUS(socket_read_full(fd, proof, sizeof proof, deadline_ns), BHVD_OK);
    send_what_goes(fd, proof, sizeof proof);
    check_closed_within(fd, QUICK_MS);
    bytes_fini(&request);
    bhvd_rendezvous_destroy(server);
}

TEST(idle_connections_delay_nobody_and_are_dropped)
{
    enum { IDLE = 200 };
    bhvd_rendezvous *server = start();
    int fds[IDLE], before = open_descriptors();
    int64_t begin = check_now_ms();
    for (int i = 0; i < IDLE; i++)
        fds[i] = i % 2 ? attach(server) : attach_authenticated(server);
    for (int i = 0; i < 3; i++)
        run_job_at_once(server, "s", 5, 100);
    for (int i = 0; i < IDLE; i++)
        check_closed_within(fds[i], 10000);
    CHECK(check_now_ms() - begin >= 4500);
    CHECK_EQ(open_descriptors_settled(before), before);
    run_job(server, "s", 5, 100);
    bhvd_rendezvous_destroy(server);
}

TEST(a_thousand_strangers_take_a_bounded_number_of_descriptors)
{
    enum { STRANGERS = 1000, KEPT_MAX = 256 };
    struct rlimit limit;
    CHECK_EQ(getrlimit(RLIMIT_NOFILE, &limit), 0);
    struct rlimit raised = {limit.rlim_max < 4096 ? limit.rlim_max : 4096, limit.rlim_max};
    if (raised.rlim_cur < 2 * STRANGERS) {
        printf(" (skipped: at most %lld descriptors)", (long long)limit.rlim_max);
        return;
    }
    if (limit.rlim_cur < raised.rlim_cur)
        CHECK_EQ(setrlimit(RLIMIT_NOFILE, &raised), 0);
    bhvd_rendezvous *server = start();
    int before = open_descriptors();
    static int fds[STRANGERS];
    for (int i = 0; i < STRANGERS; i++)
        fds[i] = attach(server);
    run_job(server, "s", 5, 100);
    CHECK(open_descriptors_settled(before + STRANGERS + KEPT_MAX) <= before + STRANGERS + KEPT_MAX);
    for (int i = 0; i < STRANGERS; i++)
        close(fds[i]);
    run_job(server, "s", 5, 100);
    bhvd_rendezvous_destroy(server);
    CHECK_EQ(setrlimit(RLIMIT_NOFILE, &limit), 0);
}

// When the process has no free descriptors, strangers must make room for ranks.
TEST(out_of_descriptors_strangers_are_evicted)
{
    struct rlimit limit;
    CHECK_EQ(getrlimit(RLIMIT_NOFILE, &limit), 0);
    bhvd_rendezvous *server = start();
    int strangers[30], filler[256], fillers = 0;
    for (int i = 0; i < 30; i++)
        strangers[i] = attach(server);
    poll(NULL, 0, 200);
    int mine = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    struct rlimit lowered = {128, limit.rlim_max};
    CHECK_EQ(setrlimit(RLIMIT_NOFILE, &lowered), 0);
    while (fillers < 256 && (filler[fillers] = dup(mine)) >= 0)
        fillers++;
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(bhvd_rendezvous_port(server)),
                                  .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    int connected = connect(mine, (struct sockaddr *)&address, sizeof address);
    CHECK(connected == 0 || errno == EINPROGRESS);
    int64_t deadline_ns = clock_deadline_ns(QUICK_MS);
    const struct auth_binding binding = binding_to(server);
    CHECK_STATUS(auth_handshake(mine, AUTH_CONNECTED, &binding, secret, sizeof secret, deadline_ns, NULL), BHVD_OK);
    close(mine);
    for (int i = 0; i < fillers; i++)
        close(filler[i]);
    CHECK_EQ(setrlimit(RLIMIT_NOFILE, &limit), 0);
    for (int i = 0; i < 30; i++)
        close(strangers[i]);
    run_job(server, "s", 5, 100);
    bhvd_rendezvous_destroy(server);
}

struct relay {
    const bhvd_rendezvous *server;
    int listener;
    bhvd_status ended;                  // the status on the server's side
    pthread_t thread;
};

static void pass_on(int from, int to, size_t size)
{
    uint8_t bytes[AUTH_HELLO_SIZE + AUTH_PROOF_SIZE];
    CHECK_STATUS(socket_read_full(from, bytes, size, clock_deadline_ns(QUICK_MS)), BHVD_OK);
    CHECK_STATUS(socket_write_full(to, bytes, size, clock_deadline_ns(QUICK_MS)), BHVD_OK);
}

// A stranger without the secret, at a port that a rank takes for the rendezvous.
static void *run_relay(void *arg)
{
    struct relay *relay = arg;
    int victim;
    uint8_t byte;
    CHECK_STATUS(socket_accept(relay->listener, clock_deadline_ns(QUICK_MS), &victim, NULL), BHVD_OK);
    const int server = attach(relay->server);
    pass_on(victim, server, AUTH_HELLO_SIZE);
    pass_on(server, victim, AUTH_HELLO_SIZE + AUTH_PROOF_SIZE);
    pass_on(victim, server, AUTH_PROOF_SIZE);
    relay->ended = socket_read_full(server, &byte, 1, clock_deadline_ns(QUICK_MS));
    close(victim);
    close(server);
    return NULL;
}

TEST(a_handshake_that_is_passed_on_convinces_neither_side)
{
    int port;
    struct bhvd_error error;
    struct relay relay = {.server = start()};
    const struct rendezvous_blob mine = {.size = 1};
    struct rendezvous_blob all;
    CHECK_STATUS(socket_listen("127.0.0.1", 0, 0, &relay.listener, &port, &error), BHVD_OK);
    CHECK_EQ(pthread_create(&relay.thread, NULL, run_relay, &relay), 0);
    const struct rendezvous_address address = {"127.0.0.1", port, secret, sizeof secret};
    CHECK_STATUS(rendezvous_exchange(&address, "s", 0, 1, &mine, &all, clock_deadline_ns(QUICK_MS), &error), BHVD_ERR_AUTH);
    pthread_join(relay.thread, NULL);
    CHECK_STATUS(relay.ended, BHVD_ERR_PEER_LOST);
    close(relay.listener);
    bhvd_rendezvous_destroy((bhvd_rendezvous *)relay.server);
}

// Single bytes do not extend the limit, which counts from the connection.
TEST(slow_bytes_delay_nobody_and_are_dropped)
{
    enum { SLOW = 20 };
    bhvd_rendezvous *server = start();
    struct auth auth;
    const struct auth_binding binding = binding_to(server);
    CHECK_STATUS(auth_begin(&auth, AUTH_CONNECTED, &binding, NULL), BHVD_OK);
    int fds[SLOW];
    int64_t begin = check_now_ms();
    for (int i = 0; i < SLOW; i++)
        fds[i] = i % 2 ? attach(server) : attach_authenticated(server);
    for (size_t sent = 0; check_now_ms() - begin < 6500; sent++) {
        for (int i = 0; i < SLOW; i++) {
            uint8_t byte = i % 2 ? auth.hello[sent % AUTH_HELLO_SIZE] : ((const uint8_t *)"BVRq")[sent % 4];
            if (sent < REQUEST_HEAD_SIZE - 1)
                send_what_goes(fds[i], &byte, 1);
        }
        if (sent % 10 == 0)
            run_job_at_once(server, "s", 5, 100);
        poll(NULL, 0, 250);
    }
    for (int i = 0; i < SLOW; i++)
        check_closed_within(fds[i], QUICK_MS);
    bhvd_rendezvous_destroy(server);
}

TEST(a_rank_that_waits_and_breaks_may_come_again)
{
    bhvd_rendezvous *server = start();
    struct rank last = rank_of(server, "s", 1, 2);
    for (int i = 0; i < 3; i++) {       // the last one sends more than allowed
        int fd = attach_authenticated(server);
        struct bytes message = {0};
        rendezvous_request_put(&message, &(struct rendezvous_request){.rank = 0, .size = 2, .respond_within_ms = 60000,
                                                                      .scope_size = 1});
        bytes_put(&message, i < 2 ? "s" : "sx", i < 2 ? 1 : 2);
        send_what_goes(fd, message.data, message.size);
        bytes_fini(&message);
        poll(NULL, 0, 50);
        if (i < 2)
            close(fd);
        else
            check_closed_within(fd, QUICK_MS);
    }
    struct rank first = rank_of(server, "s", 0, 2);
    rank_start(&first);
    rank_start(&last);
    ranks_join(&first, 1);
    ranks_join(&last, 1);
    CHECK_STATUS(first.status, BHVD_OK);
    CHECK_STATUS(last.status, BHVD_OK);
    bhvd_rendezvous_destroy(server);
}

// Connects with small receive buffers, so that a large reply does not fit into the kernel.
static int attach_narrow(const bhvd_rendezvous *server)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(bhvd_rendezvous_port(server)),
                                  .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    CHECK(fd >= 0);
    setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &(int){4096}, sizeof(int));
    setsockopt(fd, IPPROTO_TCP, TCP_MAXSEG, &(int){536}, sizeof(int));
    CHECK_EQ(connect(fd, (struct sockaddr *)&address, sizeof address), 0);
    const struct auth_binding binding = binding_to(server);
    CHECK_STATUS(auth_handshake(fd, AUTH_CONNECTED, &binding, secret, sizeof secret, clock_deadline_ns(QUICK_MS), NULL), BHVD_OK);
    return fd;
}

TEST(ranks_that_do_not_read_delay_nobody)
{
    enum { SIZE = 200, BODY = SIZE * (4 + RENDEZVOUS_BLOB_MAX) };
    bhvd_rendezvous *server = start();
    struct bytes message = {0};
    static unsigned char reply[REPLY_HEAD_SIZE + BODY];
    int fds[SIZE], before = open_descriptors();
    for (int i = 0; i < SIZE; i++) {
        static unsigned char blob[RENDEZVOUS_BLOB_MAX];
        memset(blob, i, sizeof blob);
        fds[i] = attach_narrow(server);
        message.size = 0;
        rendezvous_request_put(&message, &(struct rendezvous_request){.rank = i, .size = SIZE, .respond_within_ms = 60000,
                                                                      .scope_size = 1, .blob_size = sizeof blob});
        bytes_put(&message, "s", 1);
        bytes_put(&message, blob, sizeof blob);
        send_what_goes(fds[i], message.data, message.size);
    }
    bytes_fini(&message);
    poll(NULL, 0, 300);
    run_job_at_once(server, "other", 5, 100);
    CHECK_EQ(open_descriptors_settled(before + 2 * SIZE), before + 2 * SIZE);       // the server still holds them all

    CHECK_STATUS(socket_read_full(fds[1], reply, sizeof reply, clock_deadline_ns(10 * QUICK_MS)), BHVD_OK);
    for (int i = 0; i < SIZE; i++) {
        const unsigned char *blob = reply + REPLY_HEAD_SIZE + i * (4 + RENDEZVOUS_BLOB_MAX) + 4;
        CHECK_EQ(blob[0], i);
        CHECK_EQ(blob[RENDEZVOUS_BLOB_MAX - 1], i);
    }
    bhvd_rendezvous_destroy(server);
    for (int i = 0; i < SIZE; i++)
        close(fds[i]);
}

// All attacks at once, from several threads, while jobs run.
struct storm {
    const bhvd_rendezvous *server;
    atomic_bool over;
};

static void *run_storm(void *arg)
{
    struct storm *storm = arg;
    unsigned seed = 7;
    unsigned char bytes[200];
    while (!atomic_load(&storm->over)) {
        int fd = attach(storm->server);
        for (size_t k = 0; k < sizeof bytes; k++)
            bytes[k] = (unsigned char)rand_r(&seed);
        if (rand_r(&seed) % 2)
            memcpy(bytes, "BHVD\1\0\0\0", 8);
        send_what_goes(fd, bytes, (size_t)rand_r(&seed) % sizeof bytes);
        if (rand_r(&seed) % 2)
            setsockopt(fd, SOL_SOCKET, SO_LINGER, &(struct linger){1, 0}, sizeof(struct linger));   // a reset
        close(fd);
    }
    return NULL;
}

TEST(jobs_complete_in_a_storm)
{
    enum { THREADS = 3 };
    bhvd_rendezvous *server = start();
    struct storm storm = {.server = server};
    pthread_t threads[THREADS];
    for (int i = 0; i < THREADS; i++)
        CHECK_EQ(pthread_create(&threads[i], NULL, run_storm, &storm), 0);
    for (int i = 0; i < 30; i++)
        run_job(server, "s", 5, 100);
    atomic_store(&storm.over, true);
    for (int i = 0; i < THREADS; i++)
        pthread_join(threads[i], NULL);
    bhvd_rendezvous_destroy(server);
}

// The server is destroyed while the report of an ended rank wakes it.
TEST(it_ends_while_it_hears_of_a_rank)
{
    for (int i = 0; i < 4000; i++) {
        bhvd_rendezvous *server = start();
        bhvd_rendezvous_rank_ended(server, "", 0, 0);
        for (volatile int spin = 0; spin < i % 1000 * 40; spin++)
            ;
        bhvd_rendezvous_destroy(server);
    }
}
