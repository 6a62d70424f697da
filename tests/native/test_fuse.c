// Which ready operations are fused: core/negotiation/responses.c.
#include <stdio.h>
#include <stdlib.h>

#include "check.h"
#include "core/negotiation/responses.c"

enum { MANY = 5000, THRESHOLD = 64 };

static struct coordinator c;

// Adds an operation as if a set's only member requested it.
static struct pending *add_on(int device, int64_t count, bhvd_dtype dtype, double factor)
{
    static char names[MANY][8];
    static int number;
    char *name = names[number % MANY];
    snprintf(name, sizeof names[0], "t%d", number++ % MANY);
    const struct bhvd_tensor tensor = {.src = &c, .shape = &count, .ndim = 1, .dtype = dtype};
    const struct bhvd_args args = {.kind = BHVD_ALLREDUCE, .name = name, .tensors = &tensor, .tensor_count = 1, .op = BHVD_OP_SUM,
                                   .prescale_factor = factor, .postscale_factor = 1.0, .device = device};
    struct pending *pending = calloc(1, sizeof *pending + sizeof pending->requests[0]);
    struct bytes bytes = {0};
    request_write(&bytes, 1, &args);
    CHECK_STATUS(request_parse(bytes.data, bytes.size, &pending->requests[0]), BHVD_OK);
    pending->size = pending->requested_count = 1;
    bytes_fini(&bytes);
    fifo_put(&c.ready, pending, next);
    return pending;
}

static struct pending *add(int64_t count, bhvd_dtype dtype, double factor) { return add_on(-1, count, dtype, factor); }

static void begin(void)
{
    c = (struct coordinator){0};
}

TEST(what_goes_together_and_fits_stands_behind_the_first)
{
    begin();
    struct pending *a = add(8, BHVD_FLOAT32, 1), *b = add(8, BHVD_FLOAT64, 1), *too_much = add(10, BHVD_FLOAT32, 1),
                   *fits = add(8, BHVD_FLOAT32, 1), *full = add(1, BHVD_FLOAT32, 1), *other = add(1, BHVD_FLOAT32, 2);
    fuse(&c, THRESHOLD);
    CHECK(c.ready.head == a && a->next == b && b->next == too_much && too_much->next == other && !other->next);
    CHECK(a->fused.head == fits && !fits->next && a->fused_count == 2);
    CHECK(!b->fused.head);
    CHECK(too_much->fused.head == full && too_much->fused_nbytes == 44);
    responses_fini(&c);
}

// The first request may come from any rank of a host, each of which has its own GPU.
TEST(operations_on_any_gpu_go_together_and_others_do_not)
{
    begin();
    struct pending *a = add_on(0, 1, BHVD_FLOAT32, 1), *b = add_on(3, 1, BHVD_FLOAT32, 1);
    struct pending *on_host = add(1, BHVD_FLOAT32, 1);
    fuse(&c, THRESHOLD);
    CHECK(a->fused.head == b && a->fused_count == 2);
    CHECK(a->next == on_host && !on_host->fused.head);
    responses_fini(&c);
}

TEST(nothing_is_fused_without_a_threshold)
{
    begin();
    for (int i = 0; i < 4; i++)
        add(1, BHVD_FLOAT32, 1);
    fuse(&c, 0);
    for (struct pending *p = c.ready.head; p; p = p->next)
        CHECK_EQ(p->fused_count, 1);
    responses_fini(&c);
}

// More kinds than the search covers: each operation appears once, after one that it can be fused with.
TEST(many_kinds_are_answered_once_each)
{
    int seen = 0;
    begin();
    for (int i = 0; i < MANY; i++)
        add(1, BHVD_FLOAT32, 1 + i % (2 * OPEN_GROUPS));
    fuse(&c, THRESHOLD);
    for (struct pending *head = c.ready.head; head; head = head->next) {
        CHECK(head->fused_nbytes <= THRESHOLD);
        for (struct pending *p = head; p; p = p == head ? head->fused.head : p->next, seen++)
            CHECK(pending_is_fusable(head, p));
    }
    CHECK_EQ(seen, MANY);
    responses_fini(&c);
}
