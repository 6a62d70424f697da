// Pairwise averages that change, are revoked or fail, in virtual time: the order in which ranks post is exact.
#include "core/negotiation/pairwise.h"
#include "core/negotiation/coordinator.h"
#include "post.h"
#include "virtual_network.h"

enum { RANKS = 3, CHANGES = 20, COUNT_MAX = CHANGES + 1 };

static float values[RANKS][COUNT_MAX];
static bhvd_handle *handles[RANKS];

static struct bhvd_args args_of(bhvd_kind kind, const char *name)
{
    return (struct bhvd_args){.kind = kind, .name = name, .op = BHVD_OP_SUM, .topology = BHVD_TOPOLOGY_RING};
}

static void post_one(int r, bhvd_kind kind, const char *name, int64_t count)
{
    handles[r] = post_floats(ranks[r].ctx, args_of(kind, name), values[r], values[r], count);
}

static void finish_all(bhvd_status expected)
{
    pass(1000 * MS);
    for (int r = 0; r < RANKS; r++)
        finish(handles[r], expected);
}

static void run_on_all(bhvd_kind kind, const char *name, int64_t count)
{
    for (int r = 0; r < RANKS; r++)
        post_one(r, kind, name, count);
    finish_all(BHVD_OK);
}

static void average(const char *name, int64_t count) { run_on_all(BHVD_D_FP_S, name, count); }

// A job in which the average of `count` values is pairwise.
static void begin_pairwise(uint64_t seed, int64_t count)
{
    memset(values, 0, sizeof values);
    begin_job("ABC", seed, NULL);
    for (int i = 0; i < 3; i++)
        average("x", count);
    CHECK_EQ(ranks[0].ctx->pairwise->count, 1);
}

// Every rank posts its next average when it has the result of the last one, which others may not have.
TEST(a_pairwise_average_that_changes_is_revoked)
{
    enum { TIMES = 4, SEEDS = 20 };
    for (uint64_t seed = 0; seed < SEEDS; seed++) {
        int posted[RANKS] = {0}, ended = 0;
        begin_pairwise(seed, COUNT_MAX);
        for (int r = 0; r < RANKS; r++)
            post_one(r, BHVD_BARRIER, "begin", -1);
        while (ended < RANKS) {
            pass(MS);
            for (int r = 0; r < RANKS; r++) {
                if (posted[r] > CHANGES * TIMES || !bhvd_poll(handles[r]))
                    continue;
                finish(handles[r], BHVD_OK);
                if (posted[r] < CHANGES * TIMES)
                    post_one(r, BHVD_D_FP_S, "x", 1 + posted[r] / TIMES);
                ended += posted[r]++ == CHANGES * TIMES;
            }
        }
        CHECK_EQ(ranks[0].ctx->pairwise->count, 1);
        end_ranks();
    }
}

// So that new ones can be made.
TEST(a_join_revokes_pairwise_averages)
{
    begin_pairwise(0, 4);
    for (int round = 0; round < 3; round++) {
        for (int i = 0; i < 4; i++)
            average("x", 4);
        CHECK_EQ(ranks[0].ctx->pairwise->count, 1);
        run_on_all(BHVD_JOIN, "join", -1);
        CHECK_EQ(ranks[0].ctx->pairwise->count, 0);
        CHECK_EQ(process_set_get(&ranks[0].ctx->sets, 0)->pairwise_count, 0);
    }
    end_ranks();
}

// Rank 0 changes the arguments. The late rank posts after the others have posted or, unless it is rank 0, have been rejected.
TEST(a_late_rank_is_rejected_as_the_others_were)
{
    for (int late = 0; late < RANKS; late++) {
        begin_pairwise((uint64_t)late, 4);
        for (int i = 1; i <= RANKS; i++) {
            const int r = (late + i) % RANKS;
            if (r == late)
                pass(1000 * MS);
            post_one(r, BHVD_D_FP_S, "x", r == 0 ? 3 : 4);
        }
        for (int r = 0; r < RANKS; r++)
            CHECK_EQ(bhvd_poll(handles[r]), late != 0 && r != late);
        finish_all(BHVD_ERR_MISMATCH);
        for (int i = 0; i < 4; i++) {
            for (int r = 0; r < RANKS; r++)
                values[r][0] = (float)(100 + r);
            average("x", 4);
            for (int r = 0; r < RANKS; r++)
                CHECK_EQ(values[r][0], 101);
        }
        end_ranks();
    }
}

// Rank 2 joins while ranks 0 and 1 are at different averages, which it will never post: both are rejected.
TEST(a_join_rejects_averages_that_others_have_posted)
{
    for (uint64_t seed = 0; seed < 4; seed++) {
        begin_pairwise(seed, 4);
        for (int i = 0; i < 3; i++)
            average("y", 4);
        post_one(0, BHVD_D_FP_S, "x", 4);
        post_one(1, BHVD_D_FP_S, "y", 4);
        post_one(2, BHVD_JOIN, "join", -1);
        pass(1000 * MS);
        for (int r = 0; r < 2; r++) {
            finish(handles[r], BHVD_ERR_UNSUPPORTED);
            post_one(r, BHVD_JOIN, "join", -1);
        }
        finish_all(BHVD_OK);
        end_ranks();
    }
}

// Rank 2 has joined; ranks 0 and 1 request a sum, one after the other, with the name of a pairwise average.
TEST(a_sum_with_a_joined_rank_takes_the_name_of_an_average)
{
    for (int first = 0; first < 2; first++) {
        begin_pairwise((uint64_t)first, 4);
        post_one(2, BHVD_JOIN, "join", -1);
        bhvd_handle *join = handles[2];
        values[0][0] = values[1][0] = 1;
        for (int i = 0; i < 2; i++) {
            pass(1000 * MS);
            post_one((first + i) % 2, BHVD_ALLREDUCE, "x", 4);
        }
        pass(1000 * MS);
        for (int r = 0; r < 2; r++) {
            finish(handles[r], BHVD_OK);
            CHECK_EQ(values[r][0], 2);
            post_one(r, BHVD_JOIN, "join", -1);
        }
        CHECK(!bhvd_poll(join));
        finish_all(BHVD_OK);
        end_ranks();
    }
}

// Rank 0 has no memory for the signal to a neighbor: all operations end, those posted with this one and dropped already, too.
TEST(no_memory_for_a_signal_ends_all_operations)
{
    begin_pairwise(0, 4);
    bhvd_context *ctx = ranks[0].ctx;
    ctx->exec.connections.links[1].control_out.failed = true;
    post_one(1, BHVD_BARRIER, "none", -1);
    post_one(0, BHVD_D_FP_S, "x", 4);
    bhvd_handle_drop(handles[0]);
    post_one(0, BHVD_D_FP_S, "y", 4);
    bhvd_handle_drop(handles[0]);
    pass(1000 * MS);
    CHECK_STATUS(ctx->exec.failure.status, BHVD_ERR_SYSTEM);
    CHECK_EQ(ctx->outstanding, 0);
    finish(handles[1], BHVD_ERR_SYSTEM);
    CHECK_STATUS(bhvd_context_status(ranks[2].ctx, NULL), BHVD_ERR_SYSTEM);
    end_ranks();
}

static void warn_soon(int rank, struct bhvd_context_options *options)
{
    (void)rank;
    options->stall_warning_ms = 2000;
}

// Warnings of rank 0 about the average.
static int warnings(void)
{
    struct bhvd_record *record;
    int count = 0;
    for (; log_next(&ranks[0].ctx->log, 0, &record) == 1; bhvd_record_free(record))
        count += strstr(record->text, "has waited for rank") != NULL;
    return count;
}

// Warnings end with the context's failure, which is reported instead.
TEST(warnings_about_a_late_neighbor_end_with_the_failure)
{
    for (int fails = 0; fails < 2; fails++) {
        memset(values, 0, sizeof values);
        begin_job("ABC", 0, warn_soon);
        for (int i = 0; i < 3; i++)
            average("x", 4);
        post_one(0, BHVD_D_FP_S, "x", 4);
        pass(1000 * MS);
        CHECK_EQ(warnings(), 0);
        if (fails)
            executor_fail(&ranks[0].ctx->exec, BHVD_ERR_SYSTEM, "no memory");
        pass(4000 * MS);
        CHECK_EQ(warnings() > 0, !fails);
        bhvd_handle_drop(handles[0]);
        for (int r = 1; r < RANKS && !fails; r++) {
            post_one(r, BHVD_D_FP_S, "x", 4);
            bhvd_handle_drop(handles[r]);
        }
        pass(1000 * MS);
        end_ranks();
    }
}

// Operations that start alone do not wait until no average is in flight: each rank always has some.
TEST(pairwise_averages_do_not_keep_others_from_starting)
{
    enum { NAMES = 4, COUNT = 5000, TURNS = 30 };
    static float x[RANKS][NAMES][COUNT];
    static const char *const names[] = {"x0", "x1", "x2", "x3"};
    bhvd_handle *averages[RANKS][NAMES], *barriers[RANKS] = {NULL};
    int turns[RANKS] = {0}, ended = 0;
    begin_job("ABC", 0, NULL);
    for (int64_t begun_ns = now_ns; ended < RANKS; pass(MS)) {
        CHECK(now_ns - begun_ns < 20000 * MS);
        for (int r = 0; r < RANKS; r++) {
            CHECK(tasks_oldest_execution(&ranks[r].ctx->exec) < LINK_PAIRWISE);     // averages have no place in their order
            const int i = turns[r] % NAMES;
            if (turns[r] >= NAMES && !bhvd_poll(averages[r][i]))
                continue;
            if (turns[r] >= NAMES)
                finish(averages[r][i], BHVD_OK);
            averages[r][i] = post_floats(ranks[r].ctx, args_of(BHVD_D_FP_S, names[i]), x[r][i], x[r][i], COUNT);
            if (turns[r]++ == TURNS)
                barriers[r] = post_barrier(ranks[r].ctx, "alone");
        }
        ended = 0;
        for (int r = 0; r < RANKS; r++)
            ended += barriers[r] && bhvd_poll(barriers[r]);
    }
    for (int r = 0; r < RANKS; r++) {
        finish(barriers[r], BHVD_OK);
        for (int i = 0; i < NAMES; i++)
            bhvd_handle_drop(averages[r][i]);
    }
    end_ranks();
}
