// The runtime of the C code that tests/support/ptx.py makes of PTX. The threads of a block are fibers that switch at barriers
// and warp functions; blocks run one after the other. A kernel that would be wrong on a GPU fails with an error:
//   - an access that is not aligned to its width, or to memory that the launch cannot reach,
//   - two threads that access one byte of shared memory, one of them writing, with no barrier or warp function between; in
//     launches with `races`, also of global memory, where blocks are unordered,
//   - a barrier or a warp function that not all of its threads reach.
// Timings mean nothing. Compiled with PTX_COUNTS it counts instructions and the 32-byte sectors that warps access.
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <tgmath.h>
#include <ucontext.h>

enum { FIBERS = 256, STACK = 1 << 16, WARP = 32, SHARED_BEGIN = 256, SHARED_END = SHARED_BEGIN + 49152, SECTOR = 32 };
enum { MISALIGNED_ADDRESS = 716, ILLEGAL_ADDRESS = 700, LAUNCH_FAILED = 719 };     // the driver's codes
enum state { READY, AT_BARRIER, AT_WARP_FUNCTION, DONE };

// Whether a kernel may access these bytes of global memory.
typedef int (*reaches_fn)(uint64_t address, size_t nbytes);

// As in fake_cuda.c. Returns 0, or the driver's error code.
struct fake_function {
    int (*run)(unsigned blocks, unsigned threads, void **params, reaches_fn reaches);
    int param_count;
};

struct thread {
    uint32_t tid, ntid, ctaid, nctaid;
    const uint64_t *param;
    struct block *block;
    enum state state;
    jmp_buf stopped;                    // where it continues
    const char *at;                     // the instruction at which it waits,
    uint32_t mask, value;               // the lanes that it waits for there, and its operand
};

// The thread that last accessed a byte, and when.
struct mark {
    uint64_t epoch, warp_epoch;
    int64_t block;
    int thread;                         // MANY: several threads
};
enum { MANY = -1 };

struct byte {
    struct mark written, read;
};

// One byte of global memory, in a hash table.
struct cell {
    uint64_t address, launch;
    struct byte byte;
};
enum { CELLS = 1 << 20, PROBES = 1000 };

struct counts {
    uint64_t instructions;              // executed by all threads
    uint64_t bytes_read, bytes_written, sectors_read, sectors_written, requests;     // of global memory; requests: by warps
};

#ifdef PTX_COUNTS
enum { SITES = 2048 };                  // memory accesses in a kernel's code
struct access {
    uint32_t warp, site, occurrence, writes;
    uint64_t sector;
};
static struct {
    struct access *list;
    size_t count, capacity;
    uint32_t occurrences[FIBERS][SITES];
} trace;
static struct counts counts;
#define COUNT counts.instructions++;
#else
#define COUNT
#endif

struct block {
    jmp_buf scheduler;
    struct thread threads[FIBERS];
    unsigned made;                      // number of fibers
    unsigned char *stacks;
    void (*body)(struct thread *);
    const char *name;
    reaches_fn reaches;
    uint64_t epoch, launch;             // counts barriers, and launches, of all blocks on this host thread
    uint64_t warp_epochs[FIBERS / WARP];
    uint32_t seen[FIBERS];              // the lanes' operands of the last warp function
    uint32_t reduced;                   // the threads' operands of the last barrier: or, and, sum
    uint32_t reduced_and, reduced_sum;
    int fault;                          // the driver's code
    bool races;                         // whether to check global memory
    struct byte shadow[SHARED_END];
    _Alignas(64) char shared[SHARED_END];
};
static _Thread_local struct block *block;
static _Thread_local struct cell *cells;
static _Thread_local char message[512];

// ----------------------------------------------------------------------------------------------------------- faults

__attribute__((format(printf, 3, 4))) static void report(struct thread *t, int code, const char *format, ...)
{
    const int used = snprintf(message, sizeof message, "%s, block %u, thread %u: ", block->name, t->ctaid, t->tid);
    va_list list;
    va_start(list, format);
    vsnprintf(message + used, sizeof message - (size_t)used, format, list);
    va_end(list);
    block->fault = code;
}

// Ends a running thread, and with it the launch.
#define FAULT(t, code, ...) (report(t, code, __VA_ARGS__), _longjmp((t)->block->scheduler, 1))

static struct mark mark_of(const struct thread *t)
{
    return (struct mark){t->block->epoch, t->block->warp_epochs[t->tid / WARP], t->ctaid, (int)t->tid};
}

// Whether the marked access certainly precedes this thread's access. Blocks of a launch are unordered.
static bool is_ordered(const struct thread *t, const struct mark *mark, int64_t any_block)
{
    const struct mark now = mark_of(t);
    if (!mark->epoch || (mark->block == now.block && mark->thread == now.thread))
        return true;
    if (mark->block != now.block && any_block)
        return false;
    return mark->epoch != now.epoch ||
           (mark->thread >= 0 && mark->thread / WARP == now.thread / WARP && mark->warp_epoch != now.warp_epoch);
}

static void check_byte(struct thread *t, struct byte *byte, bool writes, int global, uint64_t address, const char *at)
{
    const struct mark now = mark_of(t);
    const struct mark *other = !is_ordered(t, &byte->written, global)           ? &byte->written
                               : writes && !is_ordered(t, &byte->read, global) ? &byte->read
                                                                               : NULL;
    if (other)
        FAULT(t, LAUNCH_FAILED, "race: %s %s memory at 0x%llx that block %lld, thread %d %s, at %s", writes ? "writes" : "reads",
              global ? "global" : "shared", (unsigned long long)address, (long long)other->block, other->thread,
              other == &byte->written ? "wrote" : "read", at);
    if (writes) {
        byte->written = now;
        return;
    }
    const bool another = !is_ordered(t, &byte->read, global);
    byte->read = now;
    if (another)
        byte->read.thread = MANY;
}

// ----------------------------------------------------------------------------------------------------------- memory

static inline char *shared_memory(struct thread *t, uint64_t address, size_t nbytes, bool writes, const char *at, int site)
{
    (void)site;
    if (address < SHARED_BEGIN || address + nbytes > SHARED_END)
        FAULT(t, ILLEGAL_ADDRESS, "outside shared memory, at %s", at);
    if (address % nbytes)
        FAULT(t, MISALIGNED_ADDRESS, "address 0x%llx is not aligned to %zu bytes, at %s", (unsigned long long)address, nbytes, at);
    for (uint64_t i = address; i < address + nbytes; i++)
        check_byte(t, &t->block->shadow[i], writes, 0, i, at);
    return t->block->shared + address;
}

// Addresses of the compiler, for constants, which are read-only.
static inline char *const_memory(struct thread *t, uint64_t address, size_t nbytes, bool writes, const char *at, int site)
{
    (void)writes, (void)site;
    if (address % nbytes)
        FAULT(t, MISALIGNED_ADDRESS, "address 0x%llx is not aligned to %zu bytes, at %s", (unsigned long long)address, nbytes, at);
    return (char *)(uintptr_t)address;
}

static struct byte *global_byte(struct thread *t, uint64_t address)
{
    uint64_t at = address * 0x9e3779b97f4a7c15u >> 44;
    for (int tries = 0; tries < PROBES; tries++, at = (at + 1) % CELLS) {
        if (cells[at].launch != t->block->launch)
            cells[at] = (struct cell){.address = address, .launch = t->block->launch};
        if (cells[at].address == address)
            return &cells[at].byte;
    }
    FAULT(t, LAUNCH_FAILED, "the launch touches too much memory to be checked for races");
}

static inline char *global_memory(struct thread *t, uint64_t address, size_t nbytes, bool writes, const char *at, int site)
{
    (void)site;
    if (!t->block->reaches(address, nbytes))
        FAULT(t, ILLEGAL_ADDRESS, "address 0x%llx is not in the kernel's memory, at %s", (unsigned long long)address, at);
    if (address % nbytes)
        FAULT(t, MISALIGNED_ADDRESS, "address 0x%llx is not aligned to %zu bytes, at %s", (unsigned long long)address, nbytes, at);
    for (uint64_t i = address; i < address + nbytes && t->block->races; i++)
        check_byte(t, global_byte(t, i), writes, 1, i, at);
#ifdef PTX_COUNTS
    *(writes ? &counts.bytes_written : &counts.bytes_read) += nbytes;
    const uint32_t occurrence = trace.occurrences[t->tid][site]++;
    for (uint64_t sector = address / SECTOR; sector <= (address + nbytes - 1) / SECTOR; sector++) {
        if (trace.count == trace.capacity) {
            trace.capacity = trace.capacity ? 2 * trace.capacity : 1 << 16;
            trace.list = realloc(trace.list, trace.capacity * sizeof *trace.list);
        }
        trace.list[trace.count++] = (struct access){t->tid / WARP, (uint32_t)site, occurrence, writes, sector};
    }
#endif
    return (char *)(uintptr_t)address;
}

#ifdef PTX_COUNTS
static int by_request(const void *a, const void *b)
{
    return memcmp(a, b, sizeof(struct access));         // sorts equal accesses and those of one request together
}

// The accesses of a warp's lanes by the same execution of an instruction are one request.
static void count_sectors(void)
{
    qsort(trace.list, trace.count, sizeof *trace.list, by_request);
    for (size_t i = 0; i < trace.count; i++) {
        const struct access *now = &trace.list[i], *before = i ? now - 1 : NULL;
        const size_t key = offsetof(struct access, sector);
        counts.requests += !before || memcmp(now, before, key) != 0;
        if (!before || memcmp(now, before, sizeof *now) != 0)
            ++*(now->writes ? &counts.sectors_written : &counts.sectors_read);
    }
    trace.count = 0;
    memset(trace.occurrences, 0, sizeof trace.occurrences);
}
#endif

// ----------------------------------------------------------------------------------------------------- the scheduler

static void stop(struct thread *t, enum state state)
{
    t->state = state;
    if (!_setjmp(t->stopped))
        _longjmp(t->block->scheduler, 1);
}

static void fiber_main(void)
{
    struct thread *t = &block->threads[block->made];
    for (;;) {
        stop(t, DONE);
        t->block->body(t);
    }
}

static void make_fibers(unsigned count)
{
    if (!block) {
        block = calloc(1, sizeof *block);
        block->stacks = malloc((size_t)FIBERS * STACK);
    }
    for (; block->made < count; block->made++) {
        ucontext_t fiber;
        getcontext(&fiber);
        fiber.uc_stack.ss_sp = block->stacks + (size_t)block->made * STACK;
        fiber.uc_stack.ss_size = STACK;
        fiber.uc_link = NULL;
        makecontext(&fiber, fiber_main, 0);
        block->threads[block->made].block = block;
        if (!_setjmp(block->scheduler))
            setcontext(&fiber);
    }
}

static void resume(struct thread *t)
{
    if (!_setjmp(t->block->scheduler))
        _longjmp(t->stopped, 1);
}

// Resumes the lanes of each warp function once all have reached it. Returns their number.
static int release_warp_functions(struct block *b, unsigned threads)
{
    int released = 0;
    for (unsigned i = 0; i < threads; i++) {
        struct thread *t = &b->threads[i], *warp = &b->threads[i / WARP * WARP];
        if (t->state != AT_WARP_FUNCTION)
            continue;
        for (unsigned lane = 0; lane < WARP && i / WARP * WARP + lane < threads; lane++) {
            const struct thread *other = &warp[lane];
            if (t->mask >> lane & 1 && (other->state != AT_WARP_FUNCTION || other->at != t->at || other->mask != t->mask))
                report(t, LAUNCH_FAILED, "lane %u of its warp does not come to %s", lane, t->at);
        }
        if (b->fault)
            return 0;
        b->warp_epochs[i / WARP]++;
        for (unsigned lane = 0; lane < WARP && i / WARP * WARP + lane < threads; lane++) {
            if (t->mask >> lane & 1) {
                b->seen[i / WARP * WARP + lane] = warp[lane].value;
                warp[lane].state = READY;
                released++;
            }
        }
    }
    return released;
}

static int release_barrier(struct block *b, unsigned threads)
{
    struct thread *waits = NULL;
    b->reduced = b->reduced_sum = 0;
    b->reduced_and = 1;
    for (unsigned i = 0; i < threads; i++)
        waits = b->threads[i].state == AT_BARRIER ? &b->threads[i] : waits;
    for (unsigned i = 0; waits && i < threads; i++) {
        struct thread *t = &b->threads[i];
        if ((t->state != AT_BARRIER || t->at != waits->at) && !b->fault)
            report(waits, LAUNCH_FAILED, "thread %u %s, not %s", i, t->state == DONE ? "ends" : "comes to another barrier", waits->at);
        t->state = READY;
        b->reduced |= t->value;
        b->reduced_and &= t->value;
        b->reduced_sum += t->value;
    }
    b->epoch++;
    return waits && !b->fault;
}

static int run_block(struct block *b, uint32_t number, uint32_t blocks, unsigned threads, const uint64_t *params)
{
    b->epoch++;
    memset(b->shared, 0xcd, sizeof b->shared);
    for (unsigned i = 0; i < threads; i++) {
        struct thread *t = &b->threads[i];
        t->tid = i;
        t->ntid = threads;
        t->ctaid = number;
        t->nctaid = blocks;
        t->param = params;
        t->state = READY;
    }
    do {
        for (unsigned i = 0; i < threads; i++) {
            if (b->threads[i].state == READY)
                resume(&b->threads[i]);
            if (b->fault) {
                b->made = 0;            // the fibers have stopped within the kernel
                return b->fault;
            }
        }
    } while (release_warp_functions(b, threads) || (!b->fault && release_barrier(b, threads)));
#ifdef PTX_COUNTS
    count_sectors();
#endif
    if (b->fault)
        b->made = 0;
    return b->fault;
}

static _Thread_local bool check_races;

static int launch(void (*body)(struct thread *), const char *name, unsigned blocks, unsigned threads, void **params, int count,
                  reaches_fn reaches)
{
    uint64_t words[count + 1];
    for (int i = 0; i < count; i++)
        memcpy(&words[i], params[i], sizeof words[i]);
    make_fibers(threads);
    if (check_races && !cells)
        cells = calloc(CELLS, sizeof *cells);
    block->body = body;
    block->name = name;
    block->reaches = reaches;
    block->races = check_races;
    block->fault = 0;
    block->launch++;
    for (uint32_t number = 0; number < blocks; number++) {
        const int code = run_block(block, number, blocks, threads, words);
        if (code) {
            fprintf(stderr, "%s\n", message);
            return code;
        }
    }
    return 0;
}

// --------------------------------------------------------------------------------------- launches by the tests themselves

struct range {
    uint64_t begin, end;
};
static _Thread_local const struct range *ranges;
static _Thread_local size_t range_count;

static int in_ranges(uint64_t address, size_t nbytes)
{
    for (size_t i = 0; i < range_count; i++) {
        if (address >= ranges[i].begin && address + nbytes <= ranges[i].end)
            return 1;
    }
    return 0;
}

#define API __attribute__((visibility("default")))
// Runs on this thread. The kernel can reach only `reachable`. races: check global memory too. Returns NULL or the error.
API const char *ptx_launch(const struct fake_function *function, unsigned blocks, unsigned threads, void **params,
                           const struct range *reachable, size_t count, int races)
{
    ranges = reachable;
    range_count = count;
    check_races = races;
    const int code = function->run(blocks, threads, params, in_ranges);
    check_races = false;
    return code ? message : NULL;
}

#ifdef PTX_COUNTS
// Counts since the last call.
API struct counts ptx_counts(void)
{
    const struct counts since = counts;
    counts = (struct counts){0};
    return since;
}
#endif

// ------------------------------------------------------------------------------------------------------ instructions

static inline float f32_of(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static inline uint32_t bits_of_f32(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static inline double f64_of(uint64_t bits)
{
    double x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static inline uint64_t bits_of_f64(double x)
{
    uint64_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

// A GPU's arithmetic returns a single kind of NaN.
static inline float canonical_f32(float x) { return x == x ? x : f32_of(0x7fffffff); }
static inline double canonical_f64(double x) { return x == x ? x : f64_of(0x7ff8000000000000u); }

#define MIN_MAX(type)                                                                                                     \
    static inline type min_##type(type a, type b) { return a != a ? b : b != b ? a : a < b ? a : b; }                     \
    static inline type max_##type(type a, type b) { return a != a ? b : b != b ? a : a > b ? a : b; }
MIN_MAX(float)
MIN_MAX(double)

// Conversion to integers truncates; NaN becomes 0, and values out of range become the limit.
#define CONVERT(type, low, high)                                                                                          \
    static inline type to_##type(double x) { return x != x ? 0 : x >= high ? (type)high : x <= low ? (type)low : (type)x; }
CONVERT(int32_t, -2147483648.0, 2147483647.0)
CONVERT(uint32_t, 0.0, 4294967295.0)
static inline int64_t to_int64_t(double x) { return x != x ? 0 : x >= 0x1p63 ? INT64_MAX : x <= -0x1p63 ? INT64_MIN : (int64_t)x; }
static inline uint64_t to_uint64_t(double x) { return !(x > 0) ? 0 : x >= 0x1p64 ? UINT64_MAX : (uint64_t)x; }

static inline uint64_t bfi(uint64_t from, uint64_t into, uint32_t begin, uint32_t count)
{
    const __uint128_t mask = (((__uint128_t)1 << count) - 1) << begin;
    return (uint64_t)((into & ~mask) | (((__uint128_t)from << begin) & mask));
}

static inline uint32_t bfe(uint32_t from, uint32_t begin, uint32_t count)
{
    return (uint32_t)((uint64_t)from >> begin & (((uint64_t)1 << count) - 1));
}

// A selector is the number of a byte: 0 to 3 in a, 4 to 7 in b; with bit 3 set, the byte's sign in all bits.
static inline uint32_t prmt(uint32_t a, uint32_t b, uint32_t selectors)
{
    const uint64_t both = (uint64_t)b << 32 | a;
    uint32_t out = 0;
    for (int i = 0; i < 4; i++) {
        const uint32_t selector = selectors >> 4 * i & 15, byte = (uint32_t)(both >> 8 * (selector & 7)) & 255;
        out |= (selector & 8 ? (byte & 128 ? 255u : 0u) : byte) << 8 * i;
    }
    return out;
}

static inline uint32_t lop3(uint32_t a, uint32_t b, uint32_t c, uint32_t table)
{
    uint32_t out = 0;
    for (int i = 0; i < 8; i++)
        out |= table >> i & 1 ? (i & 4 ? a : ~a) & (i & 2 ? b : ~b) & (i & 1 ? c : ~c) : 0;
    return out;
}

static inline uint32_t brev(uint32_t x)
{
    uint32_t out = 0;
    for (int i = 0; i < 32; i++)
        out |= (x >> i & 1) << (31 - i);
    return out;
}

static inline uint32_t clz(uint32_t x) { return x ? (uint32_t)__builtin_clz(x) : 32; }
static inline uint32_t bfind(uint32_t x) { return x ? 31 - clz(x) : UINT32_MAX; }

static inline void barrier(struct thread *t, uint32_t value, const char *at)
{
    t->value = value;
    t->at = at;
    stop(t, AT_BARRIER);
}

// On return block->seen has the operands of all lanes in the mask.
static inline const uint32_t *warp_meet(struct thread *t, uint32_t mask, uint32_t value, const char *at)
{
    const uint32_t lane = t->tid % WARP;
    if (!(mask >> lane & 1))
        FAULT(t, LAUNCH_FAILED, "its lane is not in the mask 0x%x of %s", mask, at);
    t->value = value;
    t->mask = mask;
    t->at = at;
    stop(t, AT_WARP_FUNCTION);
    return &t->block->seen[t->tid / WARP * WARP];
}

static inline uint32_t warp_end(const struct thread *t)
{
    const uint32_t first = t->tid / WARP * WARP;
    return t->ntid - first < WARP ? t->ntid - first : WARP;
}

static inline uint32_t ballot(struct thread *t, uint32_t mask, int predicate, const char *at)
{
    const uint32_t *seen = warp_meet(t, mask, predicate != 0, at);
    uint32_t out = 0;
    for (uint32_t lane = 0; lane < warp_end(t); lane++)
        out |= mask >> lane & 1 ? seen[lane] << lane : 0;
    return out;
}

enum shuffle { SHUFFLE_IDX, SHUFFLE_BFLY, SHUFFLE_UP, SHUFFLE_DOWN };

static inline uint32_t shuffle(struct thread *t, enum shuffle kind, uint32_t value, uint32_t b, uint32_t c, uint32_t mask,
                               const char *at)
{
    const uint32_t *seen = warp_meet(t, mask, value, at);
    const uint32_t lane = t->tid % WARP, segment = c >> 8 & 31, clamp = c & 31;
    const uint32_t low = lane & segment, high = low | (clamp & ~segment);
    const int32_t from = kind == SHUFFLE_IDX    ? (int32_t)(low | (b & ~segment & 31))
                         : kind == SHUFFLE_BFLY ? (int32_t)(lane ^ (b & 31))
                         : kind == SHUFFLE_UP   ? (int32_t)lane - (int32_t)(b & 31)
                                                : (int32_t)(lane + (b & 31));
    const bool inside = kind == SHUFFLE_UP ? from >= (int32_t)high : from <= (int32_t)high;
    const uint32_t source = inside ? (uint32_t)from : lane;
    if (!(mask >> source & 1) || source >= warp_end(t))
        FAULT(t, LAUNCH_FAILED, "reads lane %u, which is not in the mask 0x%x, or not in the block, at %s", source, mask, at);
    return seen[source];
}

enum reduction { REDUCE_OR, REDUCE_AND, REDUCE_ADD, REDUCE_MIN, REDUCE_MAX };

static inline uint32_t reduce_warp(struct thread *t, enum reduction kind, uint32_t value, uint32_t mask, const char *at)
{
    const uint32_t *seen = warp_meet(t, mask, value, at);
    uint32_t out = value;
    for (uint32_t lane = 0; lane < warp_end(t); lane++) {
        if (!(mask >> lane & 1) || lane == t->tid % WARP)
            continue;
        const uint32_t x = seen[lane];
        out = kind == REDUCE_OR ? out | x : kind == REDUCE_AND ? out & x : kind == REDUCE_ADD ? out + x
              : kind == REDUCE_MIN ? (x < out ? x : out) : (x > out ? x : out);
    }
    return out;
}

// ------------------------------------------------------------------------------------------------ the kernels follow
