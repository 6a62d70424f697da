// The coordinator's response to an alltoall: each member gets only its own part, so the length grows with the number of members,
// not with its square; and no frame exceeds the size that a peer accepts.
#include <stdlib.h>

#include "check.h"
#include "core/negotiation/member.h"
#include "core/negotiation/pending.h"
#include "core/context/context.h"
#include "core/message/frame.h"

enum { MANY = 3000, COLUMNS = 2, ROW_BYTES = 12 };      // n * n numbers of 8 bytes exceed a frame from 2,897 ranks on

// The number of rows that rank `from` sends to rank `to`.
static int32_t rows(int from, int to) { return (from * 7 + to * 3) % 5; }

static struct request *make_request(int rank)
{
    static int32_t splits[MANY];
    int64_t shape[] = {0, 3};
    for (int to = 0; to < MANY; to++)
        shape[0] += splits[to] = rows(rank, to);
    const struct bhvd_tensor tensor = {.shape = shape, .ndim = 2, .dtype = BHVD_FLOAT32};
    const struct bhvd_tensor tensors[COLUMNS] = {tensor, tensor};
    const struct bhvd_args args = {
        .kind = BHVD_ALLTOALL, .name = "t", .tensors = tensors, .tensor_count = COLUMNS, .op = BHVD_OP_SUM, .device = -1,
        .prescale_factor = 1.0, .postscale_factor = 1.0, .splits = splits, .split_count = MANY};
    struct bytes bytes = {0};
    request_write(&bytes, 1, &args);
    struct request *request;
    CHECK_STATUS(request_parse(bytes.data, bytes.size, &request), BHVD_OK);
    bytes_fini(&bytes);
    return request;
}

// The rank's operation when the response arrives.
static struct bhvd_operation *make_operation(int rank)
{
    struct bhvd_operation *op = calloc(1, sizeof *op + COLUMNS * sizeof op->tensors[0]);
    op->coll.args.kind = BHVD_ALLTOALL;
    op->coll.args.tensor_count = COLUMNS;
    op->coll.tensors = op->tensors;
    int32_t *splits = malloc(MANY * sizeof *splits);
    int64_t dim0 = 0;
    for (int to = 0; to < MANY; to++)
        dim0 += splits[to] = rows(rank, to);
    op->coll.args.splits = splits;
    for (int t = 0; t < COLUMNS; t++)
        op->tensors[t] = (struct tensor){.dim0 = dim0, .row_nbytes = ROW_BYTES, .dtype = BHVD_FLOAT32};
    return op;
}

static void check_response(const struct pending *pending, struct process_set *set, int member, const int64_t *longest)
{
    struct bytes out = {0};
    struct bhvd_operation *op = make_operation(member);
    pending_put_numbers(&out, pending, member, longest);
    struct bytes_reader r = bytes_read(&out);
    const uint32_t count = bytes_take_u32(&r);
    CHECK_EQ(count, COLUMNS * (MANY + 1));
    CHECK_EQ(out.size, sizeof count + count * sizeof(int64_t));
    int64_t *numbers = malloc(count * sizeof *numbers);
    memcpy(numbers, r.at, count * sizeof *numbers);
    for (int t = 0; t < COLUMNS; t++) {
        for (int from = 0; from < MANY; from++)
            CHECK_EQ(numbers[t * (MANY + 1) + from], rows(from, member));
        CHECK_EQ(numbers[t * (MANY + 1) + MANY], 4);
    }
    set->group.rank = member;
    op->response_numbers = numbers;
    op->response_number_count = count;
    CHECK(response_agrees(set, op));
    op->response_number_count = count - 1;
    CHECK(!response_agrees(set, op));
    op->response_number_count = count;
    numbers[MANY] = 2;                                   // less than it sends
    CHECK(!response_agrees(set, op));
    numbers[MANY] = INT64_MAX;
    CHECK(!response_agrees(set, op));
    numbers[MANY] = 4;
    numbers[member] = rows(member, member) ? 0 : 1;      // contradicts what it sends to itself
    CHECK(!response_agrees(set, op));
    free(numbers);
    free((void *)op->coll.args.splits);
    free(op);
    bytes_fini(&out);
}

TEST(each_member_of_an_alltoall_hears_what_it_receives)
{
    static int32_t ranks[MANY];
    struct process_set set = {.group = {.size = MANY, .ranks = ranks}, .number = 1};
    struct table table = {0};
    struct bhvd_error error;
    struct request *first = make_request(0);
    struct pending *pending = pending_create(&table, &set, 0, first);
    for (int rank = 0; rank < MANY; rank++) {
        ranks[rank] = rank;
        pending->requests[rank] = rank ? make_request(rank) : first;
        pending->requested_count++;
    }
    CHECK_STATUS(pending_check(pending, 0, &error), BHVD_OK);
    const int64_t longest[COLUMNS] = {pending_longest(pending, 0), pending_longest(pending, 1)};
    for (int member = 0; member < MANY; member += 999)
        check_response(pending, &set, member, longest);
    table_remove(&table, &pending->by_name);
    pending_free(pending);
    free(table.buckets);
}

// A coordinator that fused an operation in host memory with one on a GPU would have its memory read by NCCL.
TEST(operations_of_host_and_gpu_are_not_executed_together)
{
    struct bhvd_operation *ops[2];
    struct execution *execution = calloc(1, sizeof *execution + sizeof execution->colls[0]);
    for (int i = 0; i < 2; i++) {
        ops[i] = calloc(1, sizeof *ops[i]);
        ops[i]->coll.args = (struct bhvd_args){.kind = BHVD_ALLREDUCE, .device = -1};
    }
    CHECK(response_continues(execution, ops[0]));
    execution->count = 1;
    execution->colls[0] = &ops[0]->coll;
    CHECK(response_continues(execution, ops[1]));
    ops[1]->coll.args.device = 0;
    CHECK(!response_continues(execution, ops[1]));
    ops[0]->coll.args.device = 0;
    CHECK(response_continues(execution, ops[1]));
    free(ops[0]);
    free(ops[1]);
    free(execution);
}

// A group whose response exceeds a frame is rejected on all ranks, and the job continues.
TEST(a_group_that_is_too_large_to_agree_on)
{
    enum { TENSORS = 70000, RANKS = 64 };
    int32_t ranks[RANKS];
    const int64_t shape[] = {1};
    struct bhvd_tensor *tensors = malloc(TENSORS * sizeof *tensors);
    for (int t = 0; t < TENSORS; t++)
        tensors[t] = (struct bhvd_tensor){.shape = shape, .ndim = 1, .dtype = BHVD_UINT8};
    const struct bhvd_args args = {.kind = BHVD_ALLGATHER, .name = "g", .tensors = tensors, .tensor_count = TENSORS,
                                   .device = -1, .prescale_factor = 1.0, .postscale_factor = 1.0};
    struct process_set set = {.group = {.size = RANKS, .ranks = ranks}, .number = 1};
    struct table table = {0};
    struct bytes bytes = {0};
    struct bhvd_error error;
    request_write(&bytes, 1, &args);
    struct request *request;
    CHECK_STATUS(request_parse(bytes.data, bytes.size, &request), BHVD_OK);
    struct pending *pending = pending_create(&table, &set, 0, request);
    for (int rank = 0; rank < RANKS; rank++) {
        ranks[rank] = rank;
        pending->requests[rank] = request;
        request_retain(request);
        pending->requested_count++;
    }
    request_release(request);
    CHECK_STATUS(pending_check(pending, 0, &error), BHVD_ERR_UNSUPPORTED);
    CHECK_STR_CONTAINS(error.message, "make several groups of it");
    table_remove(&table, &pending->by_name);
    pending_free(pending);
    free(table.buckets);
    bytes_fini(&bytes);
    free(tensors);
}

TEST(a_frame_that_no_peer_would_read_is_not_sent)
{
    struct link link;
    struct bytes payload = {.data = malloc(1), .size = (size_t)LINK_FRAME_MAX + 1};
    link_init(&link, 1, &(uint64_t){0});
    CHECK_STATUS(link_send_frame(&link, FRAME_UP, &payload, false), BHVD_ERR_SYSTEM);
    CHECK_EQ(link.control_out.size, 0);
    free(payload.data);
    link_fini(&link);
}
