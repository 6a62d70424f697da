// Messages of several executions over one link, in any posting order of the two sides.
#include "check.h"
#include "messages.h"

#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

static bool lacks_memory;
#define malloc(size) (lacks_memory ? NULL : malloc(size))
#include "transport/link.c"
#undef malloc

enum { LENGTH = 1000, LOOKS = 20 };

struct side {
    struct link link;
    uint64_t started;
};

// Two ends of one connection.
struct pair {
    struct side a, b;
};

static bhvd_status on_frame(void *arg, struct link *link, uint8_t type, struct bytes_reader payload)
{
    (void)arg, (void)link, (void)type, (void)payload;
    return BHVD_ERR_SYSTEM;
}

static void connect_channel(struct channel *one, struct channel *other)
{
    int fds[2];
    CHECK_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, fds), 0);
    *one = (struct channel){.ops = &channel_tcp_ops, .fd = fds[0]};
    *other = (struct channel){.ops = &channel_tcp_ops, .fd = fds[1]};
}

static void pair_init(struct pair *pair, uint64_t started_a, uint64_t started_b)
{
    pair->a.started = started_a;
    pair->b.started = started_b;
    link_init(&pair->a.link, 1, &pair->a.started);
    link_init(&pair->b.link, 0, &pair->b.started);
    connect_channel(&pair->a.link.control, &pair->b.link.control);
    connect_channel(&pair->a.link.data_channels[0].channel, &pair->b.link.data_channels[0].channel);
}

static void pair_fini(struct pair *pair)
{
    link_fini(&pair->a.link);
    link_fini(&pair->b.link);
}

static bhvd_status look(struct pair *pair)
{
    bhvd_status status = BHVD_OK;
    for (int i = 0; i < LOOKS && !status; i++) {
        bool progress = false;
        status = link_advance(&pair->a.link, on_frame, NULL, &progress);
        if (!status)
            status = link_advance(&pair->b.link, on_frame, NULL, &progress);
    }
    return status;
}

static unsigned char *filled(unsigned char *buffer, int value)
{
    memset(buffer, value, LENGTH);
    return buffer;
}

// Bytes on the way over a data channel.
static int arrived(const struct side *side, int channel)
{
    int nbytes;
    CHECK_EQ(ioctl(side->link.data_channels[channel].channel.fd, FIONREAD, &nbytes), 0);
    return nbytes;
}

TEST(the_first_data_channel_that_can_write_takes_the_next_message)
{
    enum { DATA_CHANNELS = 3, MESSAGES = 5, LONG = 1 << 20 };   // longer than what a socket holds
    static unsigned char out[MESSAGES][LONG], in[MESSAGES][LONG];
    struct pair pair;
    struct transfer sends[MESSAGES], receives[MESSAGES];
    bool progress;
    pair_init(&pair, 5, 5);
    for (int i = 1; i < DATA_CHANNELS; i++)
        connect_channel(&pair.a.link.data_channels[i].channel, &pair.b.link.data_channels[i].channel);
    pair.a.link.data_channel_count = pair.b.link.data_channel_count = DATA_CHANNELS;
    for (int i = 0; i < MESSAGES; i++)          // all that fit go over one
        post_send(&pair.a.link, 5, &sends[i], filled(out[i], i), LENGTH);
    CHECK_STATUS(link_advance(&pair.a.link, on_frame, NULL, &progress), BHVD_OK);
    CHECK_EQ(arrived(&pair.b, 0), MESSAGES * (LENGTH + (int)sizeof sends[0].header));
    CHECK(!arrived(&pair.b, 1) && !arrived(&pair.b, 2));
    for (int i = 0; i < MESSAGES; i++)
        post_recv(&pair.b.link, 5, &receives[i], in[i], LENGTH);
    CHECK_STATUS(look(&pair), BHVD_OK);
    for (int i = 0; i < MESSAGES; i++) {
        CHECK(receives[i].done && in[i][0] == i);
        post_send(&pair.a.link, 5, &sends[i], memset(out[i], 9 + i, LONG), LONG);
    }
    CHECK_STATUS(link_advance(&pair.a.link, on_frame, NULL, &progress), BHVD_OK);
    for (int i = 0; i < DATA_CHANNELS; i++)     // the last two messages wait for the first of them that can write again
        CHECK(pair.a.link.data_channels[i].sending == &sends[i]);
    for (int i = 0; i < MESSAGES; i++)
        post_recv(&pair.b.link, 5, &receives[i], in[i], LONG);
    for (int i = 0; i < MESSAGES * LONG / LENGTH && !receives[MESSAGES - 1].done; i++)
        CHECK_STATUS(look(&pair), BHVD_OK);
    for (int i = 0; i < MESSAGES; i++)
        CHECK(sends[i].done && receives[i].done && in[i][LONG - 1] == 9 + i);
    pair_fini(&pair);
}

TEST(executions_may_be_posted_in_another_order)
{
    struct pair pair;
    struct transfer sends[4], receives[4];
    unsigned char out[4][LENGTH], in[4][LENGTH];
    pair_init(&pair, 6, 6);
    for (int i = 0; i < 4; i++)         // 5.0 6.0 5.1 6.1
        post_send(&pair.a.link, 5 + i % 2, &sends[i], filled(out[i], i), LENGTH);
    static const int order[] = {1, 3, 0, 2};
    for (int i = 0; i < 4; i++)         // 6.0 6.1 5.0 5.1
        post_recv(&pair.b.link, i < 2 ? 6 : 5, &receives[order[i]], in[order[i]], LENGTH);
    CHECK_STATUS(look(&pair), BHVD_OK);
    for (int i = 0; i < 4; i++)
        CHECK(sends[i].done && receives[i].done && in[i][0] == i && in[i][LENGTH - 1] == i);
    pair_fini(&pair);
}

TEST(what_has_not_started_waits_and_so_does_what_is_behind_it)
{
    struct pair pair;
    struct transfer sends[2], receives[2];
    unsigned char out[2][LENGTH], in[2][LENGTH];
    pair_init(&pair, 9, 3);
    post_send(&pair.a.link, 9, &sends[0], filled(out[0], 9), LENGTH);
    post_send(&pair.a.link, 3, &sends[1], filled(out[1], 3), LENGTH);
    post_recv(&pair.b.link, 3, &receives[1], in[1], LENGTH);
    CHECK_STATUS(look(&pair), BHVD_OK);
    CHECK(!receives[1].done);
    CHECK(!data_channel_wants_input(&pair.b.link, &pair.b.link.data_channels[0]));  // no reason to wake up
    pair.b.started = 9;
    post_recv(&pair.b.link, 9, &receives[0], in[0], LENGTH);
    CHECK(data_channel_wants_input(&pair.b.link, &pair.b.link.data_channels[0]));
    CHECK_STATUS(look(&pair), BHVD_OK);
    CHECK(receives[0].done && receives[1].done && in[0][0] == 9 && in[1][0] == 3);
    pair_fini(&pair);
}

TEST(what_is_unexpected_lets_others_pass)
{
    struct pair pair;
    struct transfer sends[2], receives[2];
    unsigned char out[2][LENGTH], in[2][LENGTH];
    pair_init(&pair, 4, 4);
    post_send(&pair.a.link, 4, &sends[0], filled(out[0], 4), LENGTH);
    post_send(&pair.a.link, 3, &sends[1], filled(out[1], 3), LENGTH);
    post_recv(&pair.b.link, 3, &receives[1], in[1], LENGTH);
    CHECK_STATUS(look(&pair), BHVD_OK);
    CHECK(receives[1].done && in[1][0] == 3);
    post_recv(&pair.b.link, 4, &receives[0], in[0], LENGTH);
    CHECK(receives[0].done && in[0][0] == 4);
    pair_fini(&pair);
}

// A read that returns nothing means that no more data will come (executor/poll.c).
TEST(what_a_peer_sent_early_before_it_left_is_taken_at_the_first_look)
{
    struct pair pair;
    struct transfer sends[2], receives[2];
    unsigned char out[2][LENGTH], in[2][LENGTH];
    bool progress = false;
    pair_init(&pair, 4, 4);
    post_send(&pair.a.link, 4, &sends[0], filled(out[0], 4), LENGTH);
    post_send(&pair.a.link, 3, &sends[1], filled(out[1], 3), LENGTH);
    link_number_recv(&pair.b.link, 4);          // posted later
    post_recv(&pair.b.link, 4, &receives[0], in[0], LENGTH);
    CHECK_STATUS(link_advance(&pair.a.link, on_frame, NULL, &progress), BHVD_OK);
    pair.b.link.state = LINK_DEPARTED;
    post_recv(&pair.b.link, 3, &receives[1], in[1], LENGTH);
    progress = false;
    CHECK_STATUS(link_advance(&pair.b.link, on_frame, NULL, &progress), BHVD_OK);
    CHECK(progress && receives[1].done && in[1][0] == 3);
    pair_fini(&pair);
}

// Unexpected data with nothing behind it stays in its socket: no memory, no copy.
TEST(what_is_unexpected_alone_stays_in_its_socket)
{
    struct pair pair;
    struct transfer sends[2], receives[2];
    unsigned char out[2][LENGTH], in[2][LENGTH];
    pair_init(&pair, 4, 4);
    post_send(&pair.a.link, 4, &sends[0], filled(out[0], 1), LENGTH);
    post_send(&pair.a.link, 4, &sends[1], filled(out[1], 2), LENGTH);
    link_number_recv(&pair.b.link, 4);          // posted later
    post_recv(&pair.b.link, 4, &receives[1], in[1], LENGTH);
    CHECK_STATUS(look(&pair), BHVD_OK);
    for (int i = 0; i < 2; i++) {
        bool progress = false;
        CHECK_STATUS(link_advance(&pair.b.link, on_frame, NULL, &progress), BHVD_OK);
        CHECK(!progress && pair.b.link.data_channels[0].is_unexpected);
    }
    CHECK(!receives[1].done && !pair.b.link.queues[4].unexpected.head && !pair.b.link.data_channels[0].receiving);
    link_recv_numbered(&pair.b.link, 4, 0, &receives[0], in[0], LENGTH, NULL);
    CHECK_STATUS(look(&pair), BHVD_OK);
    CHECK(receives[0].done && receives[1].done && in[0][0] == 1 && in[1][0] == 2);
    pair_fini(&pair);
}

TEST(priority_messages_go_first)
{
    struct pair pair;
    struct transfer sends[3], receives[3];
    struct transfer_queue finished = {0};
    unsigned char out[LENGTH] = {0}, in[3][LENGTH];
    pair_init(&pair, 3, 3);
    for (uint32_t i = 0; i < 3; i++) {
        link_number_send(&pair.a.link, 1 + i);
        link_send_numbered(&pair.a.link, 1 + i, 0, &sends[i], out, LENGTH, NULL, i == 2);
        link_number_recv(&pair.b.link, 1 + i);
        link_recv_numbered(&pair.b.link, 1 + i, 0, &receives[i], in[i], LENGTH, &finished);
    }
    CHECK_STATUS(look(&pair), BHVD_OK);
    CHECK(fifo_take(&finished, next) == &receives[2]);
    CHECK(fifo_take(&finished, next) == &receives[0]);
    CHECK(fifo_take(&finished, next) == &receives[1]);
    CHECK(!fifo_take(&finished, next));
    pair_fini(&pair);
}

TEST(sizes_that_differ_are_an_error)
{
    for (int is_unexpected = 0; is_unexpected < 2; is_unexpected++) {
        struct pair pair;
        struct transfer send, receive, other;
        unsigned char out[LENGTH] = {0}, in[2][LENGTH];
        pair_init(&pair, 4, 4);
        post_send(&pair.a.link, 4, &send, out, LENGTH);
        if (is_unexpected) {
            post_recv(&pair.b.link, 3, &other, in[1], LENGTH);
            CHECK_STATUS(look(&pair), BHVD_OK);
        }
        post_recv(&pair.b.link, 4, &receive, in[0], LENGTH - 1);
        CHECK(!receive.done && link_ready(&pair.b.link) == is_unexpected);
        CHECK_STATUS(look(&pair), BHVD_ERR_PROTOCOL);
        CHECK(!receive.done);
        pair_fini(&pair);
    }
}

TEST(executions_beyond_the_window_and_those_long_over_are_errors)
{
    static const struct {
        uint32_t expected, sent;
    } cases[] = {{1, 1 + LINK_MATCH_QUEUES}, {8, 1}};
    for (int i = 0; i < 2; i++) {
        struct pair pair;
        struct transfer send, receive;
        unsigned char out[LENGTH] = {0}, in[LENGTH];
        pair_init(&pair, 1 + LINK_MATCH_QUEUES, 1 + LINK_MATCH_QUEUES);
        post_recv(&pair.b.link, cases[i].expected, &receive, in, LENGTH);
        post_send(&pair.a.link, cases[i].sent, &send, out, LENGTH);
        CHECK_STATUS(look(&pair), BHVD_ERR_PROTOCOL);
        pair_fini(&pair);
    }
}

TEST(no_memory_for_a_message_is_not_the_peers_fault)
{
    for (int is_of_pairwise = 0; is_of_pairwise < 2; is_of_pairwise++) {
        struct pair pair;
        struct transfer send, other;
        unsigned char out[LENGTH] = {0}, in[LENGTH];
        const uint64_t execution = is_of_pairwise ? LINK_PAIRWISE | 7 : 4;
        pair_init(&pair, 4, 4);
        link_send_numbered(&pair.a.link, execution, link_number_send(&pair.a.link, execution), &send, out, LENGTH, NULL, false);
        post_recv(&pair.b.link, 3, &other, in, LENGTH);
        lacks_memory = true;
        CHECK_STATUS(look(&pair), BHVD_ERR_SYSTEM);
        if (is_of_pairwise)
            link_number_recv(&pair.b.link, execution);
        CHECK_EQ(pair.b.link.error, is_of_pairwise ? BHVD_ERR_SYSTEM : BHVD_OK);
        lacks_memory = false;
        pair_fini(&pair);
    }
}

TEST(numbers_go_on_beyond_32_bits)
{
    struct pair pair;
    struct transfer sends[3], receives[3];
    unsigned char out[3][LENGTH], in[3][LENGTH];
    pair_init(&pair, 1, UINT32_MAX);
    for (uint32_t i = 0; i < 3; i++)
        post_send(&pair.a.link, UINT32_MAX + i, &sends[i], filled(out[i], (int)i), LENGTH);
    post_recv(&pair.b.link, UINT32_MAX, &receives[0], in[0], LENGTH);
    CHECK_STATUS(look(&pair), BHVD_OK);
    CHECK(receives[0].done);
    pair.b.started = 1;
    for (uint32_t i = 1; i < 3; i++)
        post_recv(&pair.b.link, UINT32_MAX + i, &receives[i], in[i], LENGTH);
    CHECK_STATUS(look(&pair), BHVD_OK);
    for (int i = 0; i < 3; i++)
        CHECK(receives[i].done && in[i][0] == i);
    pair_fini(&pair);
}

static bhvd_status on_bad_news(void *arg, struct link *link, uint8_t type, struct bytes_reader payload)
{
    (void)arg, (void)link, (void)type, (void)payload;
    return BHVD_ERR_PEER_LOST;
}

// It may still be needed for a goodbye that says so.
TEST(a_frame_about_the_loss_of_another_rank_does_not_lose_its_sender)
{
    struct pair pair;
    bool progress = false;
    pair_init(&pair, 1, 1);
    CHECK_STATUS(link_send_frame(&pair.a.link, 0, &(struct bytes){0}, false), BHVD_OK);
    CHECK_STATUS(link_advance(&pair.b.link, on_bad_news, NULL, &progress), BHVD_ERR_PEER_LOST);
    CHECK_EQ(pair.b.link.state, LINK_OPEN);
    link_close(&pair.a.link);
    CHECK_STATUS(link_advance(&pair.b.link, on_bad_news, NULL, &progress), BHVD_ERR_PEER_LOST);
    CHECK_EQ(pair.b.link.state, LINK_LOST);
    pair_fini(&pair);
}

// After a failure the executor frees its transfers before the link, which has a half-received message, expected or not.
TEST(a_link_is_freed_after_the_transfers_of_its_owner)
{
    for (int is_expected = 0; is_expected < 2; is_expected++) {
        struct pair pair;
        struct transfer *send = malloc(sizeof *send), *receive = malloc(sizeof *receive), *other = malloc(sizeof *other);
        unsigned char *out = calloc(1, LINK_UNEXPECTED_MAX), *in = malloc(LINK_UNEXPECTED_MAX);
        pair_init(&pair, 4, 4);
        post_send(&pair.a.link, 4, send, out, LINK_UNEXPECTED_MAX);
        if (is_expected)
            post_recv(&pair.b.link, 4, receive, in, LINK_UNEXPECTED_MAX);
        else
            post_recv(&pair.b.link, 3, other, in, LENGTH);
        for (int i = 0; i < LOOKS; i++) {
            bool progress = false;
            if (i < 1)
                CHECK_STATUS(link_advance(&pair.a.link, on_frame, NULL, &progress), BHVD_OK);
            CHECK_STATUS(link_advance(&pair.b.link, on_frame, NULL, &progress), BHVD_OK);
        }
        const struct transfer *receiving = pair.b.link.data_channels[0].receiving;
        CHECK(receiving && receiving->moved < receiving->size && (receiving == receive) == is_expected);
        free(send);
        free(receive);
        free(other);
        free(out);
        free(in);
        pair_fini(&pair);
    }
}

// An unexpected message must be complete before a later execution uses its queue; only a broken peer violates that.
TEST(an_unexpected_message_of_an_execution_that_is_over_is_an_error)
{
    struct pair pair;
    struct transfer send, other, later;
    unsigned char *out = calloc(1, LINK_UNEXPECTED_MAX), in[2][LENGTH];
    bool progress = false;
    pair_init(&pair, 4, 4);
    post_send(&pair.a.link, 4, &send, out, LINK_UNEXPECTED_MAX);
    post_recv(&pair.b.link, 3, &other, in[0], LENGTH);
    CHECK_STATUS(link_advance(&pair.a.link, on_frame, NULL, &progress), BHVD_OK);
    for (int i = 0; i < LOOKS; i++)
        CHECK_STATUS(link_advance(&pair.b.link, on_frame, NULL, &progress), BHVD_OK);
    CHECK(pair.b.link.data_channels[0].unexpected);
    pair.b.started = 4 + LINK_MATCH_QUEUES;
    post_recv(&pair.b.link, 4 + LINK_MATCH_QUEUES, &later, in[1], LENGTH);
    bhvd_status status = BHVD_OK;
    for (int i = 0; i < LOOKS && !status; i++)
        status = look(&pair);
    CHECK_STATUS(status, BHVD_ERR_PROTOCOL);
    free(out);
    pair_fini(&pair);
}
