// A list of completed operations: each appears once, whichever thread completes it and whenever it is added.
#include "core/context/operation.c"
#include "job.h"

enum { OPERATIONS = 200 };

static void add_while_they_end(struct job *job, int rank, bhvd_context *ctx)
{
    (void)job, (void)rank;
    static _Thread_local float x[OPERATIONS][4];
    bhvd_completions *list = bhvd_completions_create();
    bool seen[OPERATIONS] = {false};
    for (int i = 0; i < OPERATIONS; i++) {
        char name[32];
        snprintf(name, sizeof name, "x.%d", i);
        bhvd_handle *handle = post_sum(ctx, name, x[i], 4);
        CHECK_STATUS(bhvd_completions_add(list, handle, i), BHVD_OK);
        bhvd_handle_drop(handle);
    }
    for (int i = 0; i < OPERATIONS; i++) {
        int64_t number = bhvd_completions_next(list, 60000);
        CHECK(number >= 0 && number < OPERATIONS && !seen[number]);
        seen[number] = true;
    }
    CHECK(bhvd_completions_next(list, 1) == -1);
    bhvd_completions_destroy(list);
}

TEST(everything_once_inproc) { run_job("inproc", "", NULL, add_while_they_end); }

TEST(everything_once_shm) { run_job("shm", "", NULL, add_while_they_end); }

struct takers {
    bhvd_completions *list;
    atomic_int times[OPERATIONS];
};

static void *take_until_the_end(void *arg)
{
    struct takers *takers = arg;
    for (int64_t number; (number = bhvd_completions_next(takers->list, 60000)) < OPERATIONS;) {
        CHECK(number >= 0);
        atomic_fetch_add(&takers->times[number], 1);
    }
    return NULL;
}

static void put(bhvd_completions *list, int64_t number)
{
    struct bhvd_operation op = {.state = OPERATION_RUNS};
    CHECK_STATUS(bhvd_completions_add(list, &op, number), BHVD_OK);
    completions_signal(&op);
}

TEST(each_number_goes_to_one_of_several_threads)
{
    struct takers takers = {bhvd_completions_create(), {0}};
    pthread_t threads[3];
    for (int i = 0; i < 3; i++)
        CHECK(pthread_create(&threads[i], NULL, take_until_the_end, &takers) == 0);
    for (int i = 0; i < OPERATIONS; i++)
        put(takers.list, i);
    for (int i = 0; i < 3; i++)
        put(takers.list, OPERATIONS);
    for (int i = 0; i < 3; i++)
        pthread_join(threads[i], NULL);
    for (int i = 0; i < OPERATIONS; i++)
        CHECK(atomic_load(&takers.times[i]) == 1);
    bhvd_completions_destroy(takers.list);
}

static void destroy_early(struct job *job, int rank, bhvd_context *ctx)
{
    (void)job;
    static _Thread_local float x[2][4];
    struct bhvd_error error;
    bhvd_completions *list = bhvd_completions_create();
    bhvd_handle *alone = rank ? NULL : post_sum(ctx, "alone", x[0], 4);
    if (alone) {
        CHECK_STATUS(bhvd_completions_add(list, alone, 1), BHVD_OK);
        CHECK_STATUS(bhvd_completions_add(list, alone, 2), BHVD_ERR_ARGUMENT);
    }
    bhvd_handle *all = post_sum(ctx, "all", x[1], 4);
    CHECK_STATUS(bhvd_completions_add(list, all, 3), BHVD_OK);
    CHECK_STATUS(bhvd_wait(all, -1, &error), BHVD_OK);
    bhvd_completions_destroy(list);         // with one operation in it or in flight, and one in progress
    bhvd_context_shutdown(ctx);
    bhvd_handle_drop(all);
    bhvd_handle_drop(alone);
}

TEST(a_list_is_destroyed_before_what_it_waits_for) { run_job("inproc", "", NULL, destroy_early); }
