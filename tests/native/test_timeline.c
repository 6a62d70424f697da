// Names in a timeline are valid UTF-8, wherever they are truncated and whatever they contain.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "core/telemetry/timeline.h"

static void write_name(const char *name, char *text, size_t size)
{
    const struct bhvd_context_options options = {.size = 1, .transport = "inproc", .cache_capacity = 4,
                                                 .start_timeout_ms = 1000, .timeout_ms = 1000,
                                                 .inproc_world = bhvd_inproc_world_create(1)};
    char path[] = "/tmp/bhvd_timeline_XXXXXX";
    float x = 1;
    const int64_t count = 1;
    const struct bhvd_tensor tensor = {.src = &x, .dst = &x, .shape = &count, .ndim = 1, .dtype = BHVD_FLOAT32};
    const struct bhvd_args args = {.kind = BHVD_ALLREDUCE, .name = name, .tensors = &tensor, .tensor_count = 1, .op = BHVD_OP_SUM,
                                   .prescale_factor = 1, .postscale_factor = 1, .device = -1};
    struct bhvd_error error;
    bhvd_context *ctx;
    bhvd_handle *handle;
    const int fd = mkstemp(path);
    CHECK(fd >= 0);
    close(fd);
    CHECK_STATUS(bhvd_context_create(&options, &ctx, &error), BHVD_OK);
    if (bhvd_timeline_start(ctx, path, 0, &error) != BHVD_OK)
        check_fail(__FILE__, __LINE__, "%s", error.message);
    CHECK_STATUS(bhvd_post(ctx, &args, &handle, &error), BHVD_OK);
    CHECK_STATUS(bhvd_wait(handle, -1, &error), BHVD_OK);
    bhvd_handle_drop(handle);
    bhvd_timeline_stop(ctx);
    bhvd_context_destroy(ctx);
    bhvd_inproc_world_destroy(options.inproc_world);
    FILE *file = fopen(path, "r");
    text[fread(text, 1, size - 1, file)] = '\0';
    fclose(file);
    remove(path);
}

TEST(a_name_is_cut_between_two_characters)
{
    static char text[1 << 16];
    for (int shift = 0; shift < 4; shift++) {
        char name[1024] = "abcd";
        for (size_t at = (size_t)shift; at + 3 < sizeof name; at += 3)
            memcpy(name + at, "\xe2\x82\xac", 4);
        write_name(name, text, sizeof text);
        const char *end = strstr(text, "\xe2\x82\xac\"}");        // the last character is complete, and the string ends after it
        CHECK(end);
    }
}

TEST(what_is_no_utf8_is_replaced)
{
    static char text[1 << 16];
    write_name("a\xff" "b\xe2\x82" "c\xc3\xa9\"\x01", text, sizeof text);
    CHECK_STR_CONTAINS(text, "\"a?b??c\xc3\xa9\\\"\\u0001\"");
}

// Rank 1 requests x again while the file is opened, during an execution of x: the end of that execution has no beginning.
TEST(only_events_that_began_in_the_file_end_there)
{
    char path[] = "/tmp/bhvd_timeline_XXXXXX", text[4096], order[16] = "";
    const struct operation_key key = {0, 1, "x"};
    const struct bytes request = {0};
    struct timeline timeline = {0};
    struct bhvd_error error;
    close(mkstemp(path));
    timeline_begin(&timeline, &key, TIMELINE_EXECUTION, "ALLREDUCE");
    CHECK_STATUS(timeline_open(&timeline, path, false, &error), BHVD_OK);
    timeline_begin(&timeline, &key, TIMELINE_NEGOTIATION, "ALLREDUCE");
    timeline_rank_ready(&timeline, &key, 1);
    timeline_operation_end(&timeline, &key, &request, false);
    timeline_rank_ready(&timeline, &key, 0);
    timeline_negotiation_end(&timeline, &key);
    timeline_begin(&timeline, &key, TIMELINE_EXECUTION, "ALLREDUCE");
    timeline_operation_end(&timeline, &key, &request, false);
    timeline_close(&timeline);
    FILE *file = fopen(path, "r");
    text[fread(text, 1, sizeof text - 1, file)] = '\0';
    fclose(file);
    remove(path);
    for (const char *phase = text; (phase = strstr(phase, "\"ph\":\"")); phase += 6)
        if (phase[6] != 'M')
            strncat(order, phase + 6, 1);
    CHECK(strcmp(order, "BXXEBE") == 0);
}
