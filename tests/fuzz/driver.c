// Drives a fuzz target (LLVMFuzzerTestOneInput) without libFuzzer, so that any gcc works: replays the corpus, then mutates
// it, seeded, and keeps in memory the inputs that reach new code.
//
//     <target> seconds runs seed corpus folder
//     <target> file
//
// It ends after `seconds` or `runs` mutations, whichever is first, and writes the inputs that reached new code to `folder`.
// A sanitizer's finding ends the process; the file "finding" then has the input, which the second form replays.
#include <dirent.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "fuzz.h"

enum { INPUT_MAX = 4096, POOL_MAX = 4096, EDGES = 1 << 16, MUTATIONS_MAX = 6 };

struct input {
    size_t size;
    unsigned char data[INPUT_MAX];
};

static struct input *pool[POOL_MAX];
static size_t pool_count;
static struct input current;
static unsigned char seen[EDGES];
static bool found_new;
static uint64_t random_state;

// Instrumented code calls it at every edge.
void __sanitizer_cov_trace_pc(void);
void __sanitizer_cov_trace_pc(void)
{
    static uintptr_t previous;
    uintptr_t here = (uintptr_t)__builtin_return_address(0);
    uintptr_t edge = (here * 0x9e3779b97f4a7c15u ^ previous) >> 16 & (EDGES - 1);
    found_new |= !seen[edge];
    seen[edge] = 1;
    previous = here * 0x9e3779b97f4a7c15u >> 1;
}

static uint32_t random_below(uint32_t limit)
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return limit ? (uint32_t)((random_state >> 16) % limit) : 0;
}

// Messages can ask for any amount of memory; a failed allocation is one of the cases.
__attribute__((visibility("default"))) const char *__asan_default_options(void);
const char *__asan_default_options(void) { return "allocator_may_return_null=1:max_allocation_size_mb=2000"; }

void __sanitizer_set_death_callback(void (*callback)(void));

static const char *folder;

static void write_input(const struct input *input, const char *name)
{
    char path[1024];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *file = fopen(path, "wb");
    if (!file || fwrite(input->data, 1, input->size, file) != input->size || fclose(file))
        fprintf(stderr, "cannot write %s\n", path);
}

static void write_finding(void)
{
    write_input(&current, "finding");
    fprintf(stderr, "the input is in %s/finding\n", folder);
}

static void on_signal(int number)
{
    write_finding();
    signal(number, SIG_DFL);
    raise(number);
}

static void execute(void)
{
    // An exact copy, so that reads past its end are found.
    unsigned char *copy = malloc(current.size ? current.size : 1);
    memcpy(copy, current.data, current.size);
    found_new = false;
    LLVMFuzzerTestOneInput(copy, current.size);
    free(copy);
}

static void keep(void)
{
    if (pool_count == POOL_MAX)
        return;
    pool[pool_count] = malloc(sizeof current);
    *pool[pool_count++] = current;
}

static void read_file(const char *path)
{
    FILE *file = fopen(path, "rb");
    if (!file) {
        fprintf(stderr, "cannot read %s\n", path);
        exit(2);
    }
    current.size = fread(current.data, 1, INPUT_MAX, file);
    fclose(file);
}

static void replay(const char *corpus)
{
    struct dirent **names;
    int count = scandir(corpus, &names, NULL, alphasort);
    if (count < 0) {
        fprintf(stderr, "there is no corpus %s\n", corpus);
        exit(2);
    }
    for (int i = 0; i < count; i++) {
        char path[1024];
        snprintf(path, sizeof path, "%s/%s", corpus, names[i]->d_name);
        if (names[i]->d_name[0] != '.') {
            read_file(path);
            execute();
            keep();
        }
        free(names[i]);
    }
    free(names);
}

static void mutate_once(void)
{
    static const uint32_t interesting[] = {0, 1, 2, 0x7f, 0x80, 0xff, 0x7fff, 0xffff, 0x10000, 0x7fffffff, 0x80000000,
                                           0xffffffff};
    uint32_t at = random_below((uint32_t)current.size), left = (uint32_t)current.size - at;
    switch (current.size ? random_below(8) : 6) {
    case 0:
        current.data[at] ^= (unsigned char)(1u << random_below(8));
        break;
    case 1:
        current.data[at] = (unsigned char)random_below(256);
        break;
    case 2: case 3: {
        uint32_t value = interesting[random_below(sizeof interesting / sizeof *interesting)];
        uint32_t width = 1u << random_below(3);
        memcpy(current.data + at, &value, width < left ? width : left);
        break;
    }
    case 4: {                       // remove
        uint32_t n = 1 + random_below(left < 16 ? left : 16);
        n = n < left ? n : left;
        memmove(current.data + at, current.data + at + n, left - n);
        current.size -= n;
        break;
    }
    case 5: {                       // repeat a part
        uint32_t n = 1 + random_below(left < 64 ? left : 64);
        n = n < left ? n : left;
        if (current.size + n > INPUT_MAX)
            break;
        memmove(current.data + at + n, current.data + at, left);
        current.size += n;
        break;
    }
    case 6: {                       // insert
        uint32_t n = 1 + random_below(8);
        if (current.size + n > INPUT_MAX)
            break;
        memmove(current.data + at + n, current.data + at, left);
        for (uint32_t i = 0; i < n; i++)
            current.data[at + i] = (unsigned char)random_below(256);
        current.size += n;
        break;
    }
    default: {                      // append the end of another input
        const struct input *other = pool[random_below((uint32_t)pool_count)];
        uint32_t from = random_below((uint32_t)other->size + 1);
        size_t n = other->size - from;
        n = at + n <= INPUT_MAX ? n : INPUT_MAX - at;
        memcpy(current.data + at, other->data + from, n);
        current.size = at + n;
    }
    }
}

int main(int argc, char **argv)
{
    if (argc == 2) {
        read_file(argv[1]);
        execute();
        return 0;
    }
    if (argc != 6) {
        fprintf(stderr, "usage: %s seconds runs seed corpus folder, or %s file\n", argv[0], argv[0]);
        return 2;
    }
    folder = argv[5];
    __sanitizer_set_death_callback(write_finding);
    signal(SIGILL, on_signal);                  // raised by REQUIRE
    signal(SIGALRM, on_signal);                 // a target's time limit
    uint64_t runs = strtoull(argv[2], NULL, 10), done = 0;
    time_t end = time(NULL) + atoi(argv[1]);
    random_state = strtoull(argv[3], NULL, 10) * 0x9e3779b97f4a7c15u | 1;
    replay(argv[4]);
    size_t corpus = pool_count;
    if (pool_count == 0)
        keep();
    for (; done < runs && (done % 64 || time(NULL) < end); done++) {
        current = *pool[random_below((uint32_t)pool_count)];
        for (uint32_t i = 1 + random_below(MUTATIONS_MAX); i; i--)
            mutate_once();
        execute();
        if (found_new)
            keep();
    }
    size_t edges = 0;
    for (size_t i = 0; i < EDGES; i++)
        edges += seen[i];
    printf("%s: corpus of %zu, %llu executions, %zu edges, %zu inputs kept\n", argv[0], corpus, (unsigned long long)done,
           edges, pool_count);
    for (size_t i = 0; i < pool_count; i++) {
        char name[32];
        snprintf(name, sizeof name, "new%05zu", i - corpus);
        if (i >= corpus)
            write_input(pool[i], name);
        free(pool[i]);
    }
    return 0;
}
