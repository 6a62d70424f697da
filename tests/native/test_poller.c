// Which links need work, and which events wake a sleeping engine.
#include <poll.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "check.h"
#include "messages.h"
#include "transport/poller.h"

enum { PEERS = 3, LENGTH = 1000 };

// This rank, 0, and the remote ends of its links.
struct world {
    struct poller poller;
    struct link links[1 + PEERS];
    int control[1 + PEERS], stream[1 + PEERS];
    uint64_t started;
};

static bhvd_status on_frame(void *arg, struct link *link, uint8_t type, struct bytes_reader payload)
{
    (void)arg, (void)link, (void)type, (void)payload;
    return BHVD_ERR_SYSTEM;
}

static int connect_channel(struct channel *channel)
{
    int fds[2];
    CHECK_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, fds), 0);
    *channel = (struct channel){.ops = &channel_tcp_ops, .fd = fds[0]};
    return fds[1];
}

static void world_init(struct world *world)
{
    world->started = 1;
    for (int i = 0; i <= PEERS; i++) {
        link_init(&world->links[i], i, &world->started);
        world->control[i] = i ? connect_channel(&world->links[i].control) : -1;
        world->stream[i] = i ? connect_channel(&world->links[i].data_channels[0].channel) : -1;
    }
    CHECK_STATUS(poller_init(&world->poller, world->links, 1 + PEERS, 0), BHVD_OK);
    CHECK_EQ(world->poller.socket_count, PEERS);
    CHECK_EQ(world->poller.polled_count, 0);
}

static void world_fini(struct world *world)
{
    poller_fini(&world->poller);
    for (int i = 0; i <= PEERS; i++) {
        link_fini(&world->links[i]);
        close(world->control[i]);
        close(world->stream[i]);
    }
}

static bool wakes(const struct world *world)
{
    struct pollfd fd = {.fd = world->poller.fd, .events = POLLIN};
    return poll(&fd, 1, 0) == 1;
}

// One engine turn: polls, and advances the links that need it. Returns their ranks, as bits.
static unsigned turn(struct world *world)
{
    struct link *gone[POLLER_EVENTS], *link;
    unsigned ranks = 0;
    bool progress;
    CHECK_EQ(poller_check(&world->poller, gone), 0);
    while ((link = link_queue_pop(&world->poller.active_links))) {
        ranks |= 1u << link->rank;
        CHECK_STATUS(link_advance(link, on_frame, NULL, &progress), BHVD_OK);
        CHECK_STATUS(poller_update(&world->poller, link), BHVD_OK);
    }
    return ranks;
}

static void say(const struct world *world, int rank, uint32_t execution, size_t size)
{
    char bytes[sizeof(struct transfer_header) + LENGTH] = {0};
    memcpy(bytes, &(struct transfer_header){execution, 0, size}, sizeof(struct transfer_header));
    CHECK_EQ(write(world->stream[rank], bytes, sizeof(struct transfer_header) + size), sizeof(struct transfer_header) + size);
}

TEST(only_links_with_something_to_do_are_looked_at)
{
    struct world world;
    struct transfer send, receive;
    char buffer[LENGTH], in[LENGTH];
    world_init(&world);
    CHECK(!wakes(&world) && turn(&world) == 0);
    post_send(&world.links[2], 1, &send, buffer, LENGTH);
    CHECK_EQ(turn(&world), 1u << 2);
    CHECK(send.done && turn(&world) == 0);
    post_recv(&world.links[3], 1, &receive, in, LENGTH);
    CHECK(!wakes(&world) && turn(&world) == 0);
    say(&world, 3, 1, LENGTH);
    CHECK(wakes(&world));
    CHECK_EQ(turn(&world), 1u << 3);
    CHECK(receive.done && !wakes(&world) && turn(&world) == 0);
    world_fini(&world);
}

// Unexpected data must not wake the engine again and again, and expected data must not be missed.
TEST(what_nobody_expects_wakes_once)
{
    struct world world;
    struct transfer receive;
    char in[LENGTH];
    world_init(&world);
    say(&world, 1, 1, LENGTH / 2);
    CHECK(wakes(&world));
    CHECK_EQ(turn(&world), 1u << 1);
    CHECK(!wakes(&world));
    say(&world, 1, 2, LENGTH / 2);
    CHECK(!wakes(&world) && turn(&world) == 0);
    post_recv(&world.links[1], 1, &receive, in, LENGTH / 2);
    CHECK_EQ(turn(&world), 1u << 1);
    CHECK(receive.done);
    // The next message's header may have been read: it belongs to an execution that has not started here.
    turn(&world);
    CHECK(!wakes(&world) && turn(&world) == 0);
    world.started = 2;
    post_recv(&world.links[1], 2, &receive, in, LENGTH / 2);
    CHECK_EQ(turn(&world), 1u << 1);
    CHECK(receive.done);
    say(&world, 1, 2, 0);
    CHECK(wakes(&world));
    world_fini(&world);
}

// Two polls, however it is woken: an unexpected message is read out, so that others can pass.
TEST(what_has_started_and_is_unexpected_is_taken_out_of_the_way)
{
    struct world world;
    struct transfer receive;
    char in[LENGTH];
    world_init(&world);
    world.started = 2;
    post_recv(&world.links[1], 1, &receive, in, LENGTH);
    say(&world, 1, 2, LENGTH / 2);
    say(&world, 1, 1, LENGTH);
    for (int i = 0; i < 3; i++)
        turn(&world);
    CHECK(receive.done);
    world_fini(&world);
}

TEST(who_sends_more_than_there_is_room_for_is_told_when_there_is)
{
    enum { MANY = 4 << 20 };
    static char out[MANY], in[1 << 16];
    struct world world;
    struct transfer send;
    world_init(&world);
    post_send(&world.links[2], 1, &send, out, MANY);
    CHECK_EQ(turn(&world), 1u << 2);
    CHECK(!send.done && !wakes(&world) && turn(&world) == 0);
    for (int reads = 0; !send.done; reads++) {
        CHECK(reads < MANY);
        CHECK(read(world.stream[2], in, sizeof in) > 0);
        turn(&world);
    }
    CHECK(turn(&world) == 0 && !wakes(&world));
    world_fini(&world);
}

// Otherwise they would be noticed with the next heartbeat, up to a second later.
TEST(the_last_messages_of_a_rank_that_has_left_wake_the_engine)
{
    struct world world;
    struct transfer receive;
    char in[LENGTH];
    world_init(&world);
    struct link *link = &world.links[1];
    post_recv(link, 1, &receive, in, LENGTH);
    link->state = LINK_DEPARTED;
    CHECK_STATUS(poller_update(&world.poller, link), BHVD_OK);
    shutdown(world.control[1], SHUT_RDWR);
    CHECK(!wakes(&world));
    say(&world, 1, 1, LENGTH);
    shutdown(world.stream[1], SHUT_RDWR);
    CHECK(wakes(&world));
    CHECK_EQ(turn(&world), 1u << 1);
    CHECK(receive.done && !wakes(&world));
    // After the last message, the end of the connection is no event.
    link->state = LINK_LOST;
    CHECK_STATUS(poller_update(&world.poller, link), BHVD_OK);
    CHECK(!wakes(&world));
    world_fini(&world);
}
