// Macros of the C tests. A test program is one file: #include "check.h", then any number of TEST(name) { ... }; main is here
// and runs them in order (with arguments: only those with an argument in their name).
//
//     CHECK(condition)                        CHECK_EQ(a, b)                  integers
//     CHECK_STATUS(call, BHVD_ERR_...)        CHECK_MEM_EQ(a, b, nbytes)
//     CHECK_STR_EQ(a, b)                      CHECK_STR_CONTAINS(text, part)
//
// The first failed check prints its location and values, and exits with 1; checks work on every thread.
#pragma once

#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "bagua_hvd.h"

struct check_test {
    const char *name;
    void (*run)(void);
    struct check_test *next;
};

static struct check_test *check_tests, **check_tests_end = &check_tests;

#define TEST(test)                                                          \
    static void test(void);                                                 \
    __attribute__((constructor)) static void check_register_##test(void)    \
    {                                                                       \
        static struct check_test entry = {#test, test, NULL};               \
        *check_tests_end = &entry;                                          \
        check_tests_end = &entry.next;                                      \
    }                                                                       \
    static void test(void)

__attribute__((format(printf, 3, 4), noreturn, unused))
static void check_fail(const char *file, int line, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    flockfile(stderr);
    fprintf(stderr, "\n%s:%d: ", file, line);
    vfprintf(stderr, format, args);
    fputc('\n', stderr);
    fflush(stderr);
    _exit(1);       // other threads still run, so no destructors
}

__attribute__((unused))
static const char *check_status_name(bhvd_status status)
{
    static const char *const names[] = {
        "BHVD_OK", "BHVD_IN_PROGRESS", "BHVD_ERR_ARGUMENT", "BHVD_ERR_MISMATCH", "BHVD_ERR_UNSUPPORTED",
        "BHVD_ERR_PEER_LOST", "BHVD_ERR_SHUTDOWN", "BHVD_ERR_TIMEOUT", "BHVD_ERR_AUTH", "BHVD_ERR_SYSTEM",
        "BHVD_ERR_PROTOCOL",
    };
    return (unsigned)status < sizeof names / sizeof names[0] ? names[status] : "no status";
}

#define CHECK(condition)                                           \
    do {                                                           \
        if (!(condition))                                          \
            check_fail(__FILE__, __LINE__, "%s", #condition);      \
    } while (0)

#define CHECK_EQ(a, b)                                                                                            \
    do {                                                                                                          \
        long long check_a = (long long)(a), check_b = (long long)(b);                                             \
        if (check_a != check_b)                                                                                   \
            check_fail(__FILE__, __LINE__, "%s == %s: %lld is not %lld", #a, #b, check_a, check_b);               \
    } while (0)

#define CHECK_STATUS(call, expected)                                                                              \
    do {                                                                                                          \
        bhvd_status check_a = (call), check_b = (expected);                                                       \
        if (check_a != check_b)                                                                                   \
            check_fail(__FILE__, __LINE__, "%s: %s, not %s", #call, check_status_name(check_a),                   \
                       check_status_name(check_b));                                                               \
    } while (0)

#define CHECK_STR_EQ(a, b)                                                                                        \
    do {                                                                                                          \
        const char *check_a = (a), *check_b = (b);                                                                \
        if (strcmp(check_a, check_b) != 0)                                                                        \
            check_fail(__FILE__, __LINE__, "%s: \"%s\", not \"%s\"", #a, check_a, check_b);                       \
    } while (0)

#define CHECK_STR_CONTAINS(text, part)                                                                            \
    do {                                                                                                          \
        const char *check_a = (text), *check_b = (part);                                                          \
        if (!strstr(check_a, check_b))                                                                            \
            check_fail(__FILE__, __LINE__, "%s: no \"%s\" in \"%s\"", #text, check_b, check_a);                   \
    } while (0)

#define CHECK_MEM_EQ(a, b, nbytes)                                                                                \
    do {                                                                                                          \
        const unsigned char *check_a = (const void *)(a), *check_b = (const void *)(b);                           \
        for (size_t check_i = 0; check_i < (size_t)(nbytes); check_i++)                                           \
            if (check_a[check_i] != check_b[check_i])                                                             \
                check_fail(__FILE__, __LINE__, "%s == %s: byte %zu is %#04x, not %#04x", #a, #b, check_i,         \
                           check_a[check_i], check_b[check_i]);                                                   \
    } while (0)

static int64_t check_now_ms(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

int main(int argc, char **argv)
{
    setvbuf(stdout, NULL, _IONBF, 0);
    for (struct check_test *test = check_tests; test; test = test->next) {
        bool wanted = argc < 2;
        for (int i = 1; i < argc; i++)
            wanted |= strstr(test->name, argv[i]) != NULL;
        if (!wanted)
            continue;
        printf("%s ...", test->name);
        int64_t start = check_now_ms();
        test->run();
        printf(" ok, %lld ms\n", (long long)(check_now_ms() - start));
    }
    return 0;
}
