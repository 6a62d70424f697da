// Heartbeats, in virtual time: all others detect a stopped rank within the limit, and not earlier, whether it has posted anything
// or not; but not one that merely keeps others waiting. test_threads.c tests the threads that send them.
#include "post.h"
#include "virtual_network.h"

enum { RANKS = 3, SEEDS = 20, LONG_MS = 60000 };

static int limit_ms, subject;          // subject: the rank with a special role

static void set_limit(int rank, struct bhvd_context_options *options)
{
    (void)rank;
    options->heartbeat_timeout_ms = limit_ms;
    options->timeout_ms = 10 * limit_ms;
    options->allreduce_path = "ring";
}

// With every limit, on every network, from many seeds.
static void in_many_jobs(void (*body)(void))
{
    static const int limits_ms[] = {1000, 6000, 60000};
    static const char *const hosts[] = {"ABC", "AAB"};
    for (int i = 0; i < 3 * 2 * SEEDS; i++) {
        limit_ms = limits_ms[i % 3];
        begin_job(hosts[i / 3 % 2], (uint64_t)i, set_limit);
        subject = (int)draw(RANKS);
        body();
        end_ranks();
    }
}

// A stopped rank is not lost earlier than this. A rank's turns are at most an interval apart, so two may pass from one heartbeat
// to the next; three more are LATE_INTERVALS of core/health/heartbeat.c.
static int64_t least_ns(void) { return (limit_ms - 5 * ranks[0].ctx->heartbeat->interval_ms) * MS; }

static int64_t limit_ns(void) { return limit_ms * MS; }

static bool others_have_failed(void)
{
    for (int r = 0; r < RANKS; r++)
        if (r != subject && !ranks[r].failed_ns)
            return false;
    return true;
}

static void expect_lost(int r, const char *sentence)
{
    struct bhvd_error error;
    CHECK_STATUS(bhvd_context_status(ranks[r].ctx, &error), BHVD_ERR_PEER_LOST);
    CHECK_STR_CONTAINS(error.message, sentence);
    CHECK_EQ(error.cause, BHVD_CAUSE_SILENT);
    CHECK_EQ(error.rank, subject);
}

static void one_is_stopped(void)
{
    bhvd_handle *barriers[RANKS] = {NULL};
    char sentence[64];
    snprintf(sentence, sizeof sentence, "rank %d was lost: nothing came from it for", subject);
    pass((int64_t)draw(10000) * MS);
    for (int r = 0; r < RANKS; r++)
        barriers[r] = r != subject && one_in(2) ? post_barrier(ranks[r].ctx, "barrier") : NULL;
    pass((int64_t)draw(3) * MS);
    struct fault *stop = add_fault(STOP, subject, NEVER);
    CHECK(run_until(others_have_failed, stop->begin_ns + limit_ns()));
    for (int r = 0; r < RANKS; r++) {
        if (r == subject)
            continue;
        CHECK(ranks[r].failed_ns - stop->begin_ns >= least_ns());
        expect_lost(r, sentence);
        if (barriers[r])
            finish(barriers[r], BHVD_ERR_PEER_LOST);
    }
    stop->end_ns = now_ns;              // it continues, and learns what the others reported
    pass(1000 * MS);
    snprintf(sentence, sizeof sentence, "the other ranks go on without rank %d", subject);
    expect_lost(subject, sentence);
}

static void all_post_after(int64_t ns)
{
    bhvd_handle *barriers[RANKS];
    for (int r = 0; r < RANKS; r++) {
        barriers[r] = post_barrier(ranks[r].ctx, "barrier");
        pass(ns);
    }
    pass(1000 * MS);
    for (int r = 0; r < RANKS; r++)
        finish(barriers[r], BHVD_OK);
}

static void one_continues_in_time(void)
{
    pass((int64_t)draw(10000) * MS);
    for (int times = 0; times < 2; times++) {
        const struct fault *stop = add_fault(STOP, subject, now_ns + least_ns() - 100 * MS);
        pass(stop->end_ns - now_ns + limit_ns());
    }
    all_post_after(0);
}

static void all_are_stopped(void)
{
    pass((int64_t)draw(10000) * MS);
    for (int r = 0; r < RANKS; r++)
        add_fault(STOP, r, now_ns + limit_ns() + limit_ns() / 4 + (int64_t)draw(100) * MS);
    pass(3 * limit_ns());
    all_post_after(0);
}

static void one_is_late(void) { all_post_after(2 * limit_ns()); }

TEST(a_stopped_rank_is_lost_after_the_limit) { in_many_jobs(one_is_stopped); }
TEST(a_rank_that_continues_in_time_is_not_lost) { in_many_jobs(one_continues_in_time); }
TEST(nobody_is_lost_if_all_were_stopped) { in_many_jobs(all_are_stopped); }
TEST(a_late_rank_is_not_lost) { in_many_jobs(one_is_late); }

// ----------------------------------------------------------------------------------- connections between two other ranks

static float values[RANKS][8];

static void post_sums(bhvd_handle **sums, const char *name)
{
    for (int r = 0; r < RANKS; r++)
        sums[r] = post_sum(ranks[r].ctx, name, values[r], 8);
}

// The connection between ranks 1 and 2 breaks; both keep theirs to rank 0. What they send to each other is not acknowledged.
static void a_connection_breaks(void)
{
    bhvd_handle *sums[RANKS];
    post_sums(sums, "opens the connections");
    pass(1000 * MS);
    for (int r = 0; r < RANKS; r++)
        finish(sums[r], BHVD_OK);
    add_fault(CUT_PAIR, 1, NEVER)->other = 2;
    pass(2 * limit_ns());               // nobody needs the connection
    post_sums(sums, "over all connections");
    const int64_t posted_ns = now_ns;
    subject = RANKS;
    CHECK(run_until(others_have_failed, posted_ns + limit_ns()));
    for (int r = 0; r < RANKS; r++) {
        struct bhvd_error error;
        CHECK(ranks[r].failed_ns - posted_ns >= least_ns());
        CHECK_STATUS(bhvd_wait(sums[r], 0, &error), BHVD_ERR_PEER_LOST);
        CHECK_STR_CONTAINS(error.message, "was lost: its host acknowledged nothing for");
        CHECK(error.cause == BHVD_CAUSE_SILENT && (error.rank == 1 || error.rank == 2));
        bhvd_handle_drop(sums[r]);
    }
}

TEST(a_broken_connection_is_detected_by_the_rank_that_sends_over_it) { in_many_jobs(a_connection_breaks); }

// ------------------------------------------------------------------------------ limits while others send heartbeats only

static void one_is_impatient(int rank, struct bhvd_context_options *options)
{
    options->heartbeat_timeout_ms = LONG_MS;
    options->timeout_ms = rank == subject ? limit_ms : LONG_MS;
    options->fusion_threshold = 0;
}

static int add_set(int a, int b)
{
    const int32_t members[] = {a < b ? a : b, a < b ? b : a};
    struct bhvd_error error;
    int id;
    for (int r = 0; r < RANKS; r++)
        CHECK_STATUS(process_set_add(&ranks[r].ctx->sets, &ranks[r].ctx->exec, members, 2, false, &id, &error), BHVD_OK);
    return id;
}

static bhvd_handle *post_in(int set, const char *name, int r)
{
    const struct bhvd_args args = {.kind = BHVD_ALLREDUCE, .name = name, .op = BHVD_OP_SUM, .process_set = set};
    return post_floats(ranks[r].ctx, args, values[r], values[r], 1);
}

// The busy rank is in as many operations with a stopped one as may be in flight; meanwhile the impatient rank waits for it in a
// later operation.
static void wait_for_the_busy(int impatient, int busy, int stopped)
{
    enum { EARLIER = LINK_MATCH_QUEUES };
    bhvd_handle *handles[RANKS][EARLIER + 1] = {{NULL}};
    subject = impatient;
    limit_ms = 2500;
    begin_job("ABC", (uint64_t)(RANKS * impatient + busy), one_is_impatient);
    const int earlier_set = add_set(busy, stopped), set = add_set(impatient, busy);
    for (int i = 0; i < 2 * EARLIER; i++) {
        const char name[] = {'A' + (char)(i % EARLIER), 0};
        const int r = i < EARLIER ? stopped : busy;
        handles[r][i % EARLIER] = post_in(earlier_set, name, r);
        if (i != EARLIER - 1)
            continue;
        pass(100 * MS);                 // they are requested
        add_fault(STOP, stopped, now_ns + 3 * limit_ns());
    }
    handles[busy][EARLIER] = post_in(set, "later", busy);
    handles[impatient][EARLIER] = post_in(set, "later", impatient);
    pass(2 * limit_ns());
    CHECK(!bhvd_poll(handles[busy][0]) && !bhvd_poll(handles[impatient][EARLIER]));
    pass(2 * limit_ns());
    for (int r = 0; r < RANKS; r++)
        for (int i = 0; i <= EARLIER; i++)
            if (handles[r][i])
                finish(handles[r][i], BHVD_OK);
    end_ranks();
}

TEST(a_rank_waits_for_one_that_is_busy_with_an_earlier_operation)
{
    wait_for_the_busy(0, 1, 2);
    wait_for_the_busy(0, 2, 1);
    wait_for_the_busy(1, 0, 2);
    wait_for_the_busy(2, 0, 1);
}

// Rank 1 sends heartbeats twice as often as rank 0.
static void rank_1_is_talkative(int rank, struct bhvd_context_options *options)
{
    subject = 0;
    one_is_impatient(rank, options);
    if (rank == 1)
        options->heartbeat_timeout_ms = 4000;
}

// Rank 2 is stopped in an operation: rank 0's limit expires, whatever rank 1 sends in the meantime.
static void check_limit(void)
{
    bhvd_handle *sums[RANKS];
    char sentence[80];
    snprintf(sentence, sizeof sentence, "no progress for %.1f s inside an operation while waiting for", limit_ms / 1000.0);
    begin_job("ABC", (uint64_t)limit_ms, rank_1_is_talkative);
    sums[2] = post_sum(ranks[2].ctx, "sum", values[2], 8);
    pass(100 * MS);                     // it is requested
    add_fault(STOP, 2, now_ns + 3 * limit_ns());
    for (int r = 0; r < 2; r++)
        sums[r] = post_sum(ranks[r].ctx, "sum", values[r], 8);
    const int64_t posted_ns = now_ns;
    pass(4 * limit_ns());
    CHECK(ranks[0].failed_ns >= posted_ns + limit_ns());
    CHECK(ranks[0].failed_ns <= posted_ns + limit_ns() + limit_ns() / 4);
    for (int r = 0; r < RANKS; r++) {
        struct bhvd_error error;
        CHECK_STATUS(bhvd_wait(sums[r], 0, &error), BHVD_ERR_TIMEOUT);
        CHECK_STR_CONTAINS(error.message, sentence);
        bhvd_handle_drop(sums[r]);
    }
    end_ranks();
}

TEST(heartbeats_are_not_progress)
{
    static const int limits_ms[] = {500, 1000, 2500, 30000};
    for (int i = 0; i < 4; i++) {
        limit_ms = limits_ms[i];
        check_limit();
    }
}
