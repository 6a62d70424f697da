// A rank of three, as coordinator or as member, with operations of every kind in progress, and peers that send any frames:
// through the ring and the framing of link.c, or frame by frame. Executions are checked, but do not run.
//
//     role, posts, cut (u8 each), then the stream, or for each frame: peer, type (u8), size (u16), payload. A frame from
//     the rank itself is a turn of the engine, see take_turn; with an odd type, the rank wants to leave.
//     role, bits: 1 member instead of coordinator; 2 raw stream instead of frames; 4 posts are not requested; 8 in a tree,
//     here a chain, in which the member relays for rank 2; 16 as that rank 2. posts: which operations. cut: bytes that
//     arrive at once.
#include "fuzz.h"

#include "core/negotiation/member.h"
#include "core/context/context.h"
#include "core/api/api.h"
#include "core/context/operation.h"
#include "core/engine/engine.h"
#include "core/message/frame.h"
#include "core/negotiation/coordinator.h"
#include "core/negotiation/departure.h"
#include "transport/shm_segment.h"

enum { RANKS = 3, OPERATIONS = 8, ELEMENTS = 6, FRAMES_MAX = 40 };

static const struct {
    bhvd_kind kind;
    const char *name;
    int ndim;
} OPERATION[OPERATIONS] = {
    {BHVD_ALLREDUCE, "a", 1}, {BHVD_ALLGATHER, "g", 2}, {BHVD_ALLTOALL, "t", 1}, {BHVD_BROADCAST, "b", 1},
    {BHVD_JOIN, "join", -1},  {BHVD_C_LP_S, "c", 1},    {BHVD_BARRIER, "r", -1}, {BHVD_PROCESS_SET_ADD, "p", -1},
};

static void *world;
static float memory[OPERATIONS * ELEMENTS];
static bhvd_handle *handles[OPERATIONS];

// One world serves all inputs: creating one takes far longer than an input.
static void empty_rings(const struct shm_segment *memory)
{
    for (int from = 0; from < RANKS; from++) {
        for (int to = 0; to < RANKS; to++) {
            struct ring *ring = shm_segment_control_ring(memory, from, to);
            atomic_store(&ring->head, 0);
            atomic_store(&ring->tail, 0);
        }
    }
}

// Like bhvd_context_create, but without the progress thread.
static bhvd_context *make_context(int rank, bool in_tree)
{
    struct bhvd_error error;
    const struct bhvd_context_options options = {
        .rank = rank, .size = RANKS, .transport = "inproc", .inproc_world = world, .fusion_threshold = 1 << 10,
        .cache_capacity = 2, .timeout_ms = 1000, .negotiation = in_tree ? "tree" : "star", .negotiation_fanout = in_tree};
    bhvd_context *ctx;
    REQUIRE(!context_new(&options, &ctx, &error));
    kernel_table_init(&ctx->exec.kernels, 0);
    REQUIRE(!connections_init(&ctx->exec.connections, &ctx->options, NULL, &error) && !context_prepare(ctx));
    empty_rings(&ctx->exec.connections.shm);
    const int32_t all[] = {0, 1, 2}, some[] = {0, 1};
    int id;
    REQUIRE(!process_set_add(&ctx->sets, &ctx->exec, all, 3, false, &id, &error) &&
            !process_set_add(&ctx->sets, &ctx->exec, some, 2, false, &id, &error));
    return ctx;
}

static void post(bhvd_context *ctx, int index)
{
    const int64_t shape[] = {ELEMENTS / 2 * (OPERATION[index].ndim < 2) + ELEMENTS / 2, OPERATION[index].ndim};
    const int32_t ranks[] = {1, 2};
    bool on_pair = index % 2 && OPERATION[index].kind != BHVD_PROCESS_SET_ADD && ctx->options.rank < 2;
    struct bhvd_tensor tensor = {.src = memory + index * ELEMENTS, .shape = shape, .ndim = OPERATION[index].ndim, .dtype = BHVD_FLOAT32};
    struct bhvd_args args = {
        .kind = OPERATION[index].kind, .name = OPERATION[index].name, .tensors = &tensor,
        .tensor_count = OPERATION[index].ndim >= 0, .op = BHVD_OP_SUM, .prescale_factor = 1.0, .postscale_factor = 1.0,
        .codec = BHVD_CODEC_MINMAX_UINT8, .device = -1, .process_set = on_pair,
        .splits = OPERATION[index].kind == BHVD_PROCESS_SET_ADD ? ranks : NULL,
        .split_count = OPERATION[index].kind == BHVD_PROCESS_SET_ADD ? 2 : 0, .blocking = 1};
    struct bhvd_error error;
    REQUIRE(!bhvd_post(ctx, &args, &handles[index], &error));
}

static void send_requests(bhvd_context *ctx)
{
    struct bhvd_operation *posted = fifo_take_all(&ctx->posted);
    atomic_store(&ctx->posted_count, 0);
    if (posted)
        REQUIRE(!member_request(ctx, posted));
}

static void drop(int index)
{
    bhvd_handle_drop(handles[index]);
    handles[index] = NULL;
}

// Completes the first execution, and posts the same again: by a cached id if it has one.
static void take_turn(bhvd_context *ctx)
{
    struct execution *execution = fifo_take(&ctx->executions, next);
    if (execution) {
        for (int i = 0; i < execution->count; i++)
            operation_complete(operation_of(execution->colls[i]), NULL);
        free(execution);
    }
    for (int i = 0; i < OPERATIONS && !ctx->closing.status; i++) {
        if (handles[i] && bhvd_poll(handles[i])) {
            drop(i);
            post(ctx, i);
        }
    }
    send_requests(ctx);
}

// Checks the executions that the engine would run: each contains every part once, and belongs to its process set.
static void look_at_executions(const bhvd_context *ctx)
{
    for (const struct execution *e = ctx->executions.head; e; e = e->next) {
        const struct process_set *set = process_set_find(&ctx->sets, e->process_set);
        REQUIRE(e->count > 0);
        for (int i = 0; i < e->count; i++) {
            const struct bhvd_operation *op = operation_of(e->colls[i]);
            REQUIRE(set && set->group.rank >= 0 && op->phase == OPERATION_AGREED && !operation_is_complete(op) &&
                    op->key.process_set == e->process_set);
            REQUIRE(i == 0 || (op->coll.args.kind == BHVD_ALLREDUCE && e->colls[0]->args.kind == BHVD_ALLREDUCE));
            REQUIRE(!op->coll.is_proxy || op->coll.args.kind == BHVD_ALLREDUCE ||
                    bhvd_encoded_size(op->coll.args.codec, op->coll.tensors[0].dtype, 1, &op->coll.args.codec_options));
            REQUIRE(response_agrees(set, op));
            for (int j = 0; j < i; j++)
                REQUIRE(e->colls[j] != &op->coll);
        }
    }
}

// No rank is below two children, or this rank below itself; collected items have been sent.
static void look_at_relay(const bhvd_context *ctx)
{
    const struct relay *relay = ctx->relay;
    uint64_t below = 0;
    for (int i = 0; i < relay->tree.child_count; i++) {
        const struct tree_child *child = &relay->tree.children[i];
        REQUIRE(rank_set_has(&child->below, child->rank) && !(below & child->below.words[0]));
        below |= child->below.words[0];
        REQUIRE(child->out.size == 0 || ctx->exec.failure.status);
    }
    REQUIRE(!(below >> ctx->options.rank & 1) && below < 1 << RANKS);
    REQUIRE(bundle_size(&relay->bundle) == 0 || ctx->exec.failure.status);
}

static bhvd_status on_frame(void *arg, struct link *link, uint8_t type, struct bytes_reader payload)
{
    bhvd_context *ctx = arg;
    bhvd_status status = engine_callbacks.on_frame(ctx, link, type, payload);
    look_at_executions(ctx);
    for (const struct bhvd_operation *op = ctx->posted.head; op; op = op->next)
        REQUIRE(!operation_is_complete(op));
    // A rank that said goodbye is not waited for.
    bool needed = ctx->options.rank == COORDINATOR || link->rank == COORDINATOR;
    // The coordinator's end may come through a parent.
    if (!status && link->state == LINK_DEPARTED && needed)
        REQUIRE(ctx->closing.status || ctx->coordinator->requesters[link->rank].departed || ctx->relay->closing_by_ns);
    return status;
}

static void fail(bhvd_context *ctx) { executor_fail(&ctx->exec, BHVD_ERR_SYSTEM, "a peer broke the protocol"); }

// Writes the stream into the ring as peer 0 or 1, a few bytes at a time.
static void send_stream(bhvd_context *ctx, const uint8_t *data, size_t size, size_t cut)
{
    struct link *link = &ctx->exec.connections.links[ctx->options.rank == 0];
    while (size && !ctx->exec.failure.status) {
        size_t n = size < cut ? size : cut;
        bool progress;
        n = ring_write(link->control.rx, link->control.capacity, data, n);
        data += n;
        size -= n;
        if (link_advance(link, on_frame, ctx, &progress))
            fail(ctx);
    }
}

static void send_frames(bhvd_context *ctx, struct supply *s)
{
    for (int i = 0; i < FRAMES_MAX && s->at < s->end && !ctx->exec.failure.status; i++) {
        int peer = supply_u8(s) % RANKS;
        uint8_t type = supply_u8(s);
        size_t size = supply_u16(s);
        const uint8_t *payload = supply_bytes(s, &size);
        struct link *link = &ctx->exec.connections.links[peer];
        if (peer == ctx->options.rank && type % 2 && !ctx->exec.failure.status) {
            if (departure_begin(ctx))
                fail(ctx);
        } else if (peer == ctx->options.rank)
            take_turn(ctx);
        else if (on_frame(ctx, link, type, (struct bytes_reader){payload, payload + size, false}))
            fail(ctx);
        if (!ctx->exec.failure.status && ctx->coordinator->ready.head && coordinator_respond(ctx))
            fail(ctx);
        if (!ctx->exec.failure.status)
            relay_flush(ctx);
        look_at_relay(ctx);
        look_at_executions(ctx);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct supply s = {data, data + size};
    uint8_t role = supply_u8(&s), posts = supply_u8(&s), cut = supply_u8(&s);
    if (!world)
        world = bhvd_inproc_world_create(RANKS);
    bhvd_context *ctx = make_context(role & 8 && role & 16 ? 2 : role & 1, role & 8);
    for (int i = 0; i < OPERATIONS; i++) {
        if (posts & 1 << i)
            post(ctx, i);
    }
    if (!(role & 4))
        send_requests(ctx);
    if (role & 2)
        send_stream(ctx, s.at, (size_t)(s.end - s.at), cut + 1u);
    else
        send_frames(ctx, &s);
    fail(ctx);
    for (int i = 0; i < OPERATIONS; i++) {
        struct bhvd_error error;
        if (handles[i]) {
            REQUIRE(bhvd_poll(handles[i]));
            bhvd_status status = bhvd_wait(handles[i], 0, &error);
            REQUIRE(status == BHVD_OK || (status >= BHVD_ERR_ARGUMENT && status <= BHVD_ERR_SYSTEM));
            drop(i);
        }
    }
    // No peer reads; a context would wait a second for it.
    for (int i = 0; i < RANKS; i++)
        ctx->exec.connections.links[i].control_out.size = ctx->exec.connections.links[i].control_flushed = 0;
    bhvd_context_destroy(ctx);
    return 0;
}
