#include "core/negotiation/relay.h"

#include <stdlib.h>

#include "base/status.h"
#include "core/context/context.h"

bhvd_status tree_fanout(const struct bhvd_context_options *options, int *fanout, struct bhvd_error *error)
{
    const char *name = options->negotiation ? options->negotiation : "";
    int wanted = options->negotiation_fanout ? options->negotiation_fanout : TREE_FANOUT;
    if (wanted < 1)
        return error_set(error, BHVD_ERR_ARGUMENT, "BAGUA_HVD_NEGOTIATION_FANOUT=%d: a relay needs 1 child or more", wanted);
    if (strcmp(name, "star") == 0)
        *fanout = TREE_STAR;
    else if (strcmp(name, "tree") == 0)
        *fanout = wanted;
    else if (!name[0])
        *fanout = options->size > TREE_STAR_RANKS ? wanted : TREE_STAR;
    else
        return error_set(error, BHVD_ERR_ARGUMENT, "BAGUA_HVD_NEGOTIATION is \"%s\"; known are star, tree", name);
    return BHVD_OK;
}

bool tree_parents(const int *host_of, int size, int fanout, int *parents)
{
    int *memory = calloc(3 * (size_t)size + 1, sizeof *memory);
    if (!memory)
        return false;
    int *by_host = memory;              // ranks, host by host
    int *first = memory + size, *seen = first + size + 1;       // by host: its index in by_host; number of its ranks seen
    for (int rank = 0; rank < size; rank++)
        first[host_of[rank] + 1]++;
    for (int host = 0; host < size; host++)
        first[host + 1] += first[host];
    for (int rank = 0; rank < size; rank++) {
        const int host = host_of[rank], before = seen[host]++;
        by_host[first[host] + before] = rank;
        if (fanout == TREE_STAR)
            parents[rank] = rank ? 0 : -1;
        else if (before)
            parents[rank] = by_host[first[host] + (before - 1) / fanout];
        else
            parents[rank] = host ? by_host[first[(host - 1) / fanout]] : -1;
    }
    free(memory);
    return true;
}

bool tree_choose(const struct bhvd_context_options *options, const int *host_of, bool *talks_to)
{
    int fanout = 0, *parents = malloc((size_t)options->size * sizeof *parents);
    const bool there = parents && !tree_fanout(options, &fanout, NULL) && tree_parents(host_of, options->size, fanout, parents);
    for (int other = 0; other < options->size && there; other++)
        talks_to[other] = other == 0 || options->rank == 0 || parents[other] == options->rank || parents[options->rank] == other;
    free(parents);
    return there;
}

static bhvd_status add_child(struct tree *tree, int rank, int size)
{
    struct tree_child *children = realloc(tree->children, (size_t)(tree->child_count + 1) * sizeof *children);
    if (!children)
        return BHVD_ERR_SYSTEM;
    tree->children = children;
    struct tree_child *child = &children[tree->child_count];
    *child = (struct tree_child){.rank = rank};
    if (!rank_set_init(&child->below, size))
        return BHVD_ERR_SYSTEM;
    tree->child_count++;
    return BHVD_OK;
}

bhvd_status tree_init(struct tree *tree, const int *host_of, int size, int rank, int fanout)
{
    int *parents = malloc((size_t)size * sizeof *parents);
    tree->towards = malloc((size_t)size * sizeof *tree->towards);
    bool ok = parents && tree->towards && tree_parents(host_of, size, fanout, parents);
    for (int other = 0; other < size && ok; other++) {   // a parent comes before its children
        const int parent = parents[other];
        tree->parent = other == rank ? parent : tree->parent;
        tree->towards[other] = other == rank || parent < 0 ? -1 : parent == rank ? tree->child_count : tree->towards[parent];
        ok = parent != rank || !add_child(tree, other, size);
        if (ok && tree->towards[other] >= 0)
            rank_set_add(&tree->children[tree->towards[other]].below, other);
    }
    free(parents);
    return ok ? BHVD_OK : BHVD_ERR_SYSTEM;
}

void tree_fini(struct tree *tree)
{
    for (int i = 0; i < tree->child_count; i++) {
        rank_set_fini(&tree->children[i].below);
        bytes_fini(&tree->children[i].out);
    }
    free(tree->children);
    free(tree->towards);
    *tree = (struct tree){0};
}

struct tree_child *tree_child(struct tree *tree, int rank)
{
    struct tree_child *child = tree_child_towards(tree, rank);
    return child && child->rank == rank ? child : NULL;
}

struct tree_child *tree_child_towards(struct tree *tree, int rank)
{
    const int index = tree->towards[rank];
    return index < 0 ? NULL : &tree->children[index];
}

// -------------------------------------------------------------------------------------------------------------- relays

bool bundle_init(struct bundle *bundle, int size) { return rank_set_init(&bundle->ranks, size); }

void bundle_fini(struct bundle *bundle)
{
    rank_set_fini(&bundle->ranks);
    bytes_fini(&bundle->items);
    bytes_fini(&bundle->out);
}

void bundle_clear(struct bundle *bundle) { bundle->out.size = bundle->items.size = 0; }

void bundle_put(struct bundle *bundle, const struct rank_set *from, struct bytes_reader items)
{
    const size_t size = (size_t)(items.end - items.at), last = bundle->items.size;
    if (last && last == size && !rank_set_overlaps(&bundle->ranks, from) && memcmp(bundle->items.data, items.at, size) == 0) {
        rank_set_unite(&bundle->ranks, from);
        return;
    }
    if (last && !rank_set_equals(&bundle->ranks, from))
        bundle_write(bundle);
    rank_set_copy(&bundle->ranks, from);
    bytes_put(&bundle->items, items.at, size);
}

const struct bytes *bundle_write(struct bundle *bundle)
{
    if (bundle->items.size) {
        rank_set_put(&bundle->out, &bundle->ranks);
        bytes_put_u32(&bundle->out, (uint32_t)bundle->items.size);
        bytes_put(&bundle->out, bundle->items.data, bundle->items.size);
        bundle->items.size = 0;
    }
    return &bundle->out;
}

bhvd_status relay_init(bhvd_context *ctx, const struct relay_receivers *receivers)
{
    struct relay *relay = ctx->relay = calloc(1, sizeof *relay);
    const int size = ctx->options.size, rank = ctx->options.rank;
    if (!relay)
        return BHVD_ERR_SYSTEM;
    relay->receivers = receivers;
    relay->ranks = malloc((size_t)size * sizeof *relay->ranks);
    if (!relay->ranks || !bundle_init(&relay->bundle, size) || !rank_set_init(&relay->myself, size) ||
        !rank_set_init(&relay->named, size) || !rank_set_init(&relay->part, size) || !rank_set_init(&relay->subtree, size) ||
        tree_init(&relay->tree, ctx->exec.connections.host_of, size, rank, ctx->tree_fanout))
        return BHVD_ERR_SYSTEM;
    rank_set_add(&relay->myself, rank);
    rank_set_add(&relay->subtree, rank);
    for (int i = 0; i < relay->tree.child_count; i++)
        rank_set_unite(&relay->subtree, &relay->tree.children[i].below);
    return BHVD_OK;
}

void relay_fini(bhvd_context *ctx)
{
    struct relay *relay = ctx->relay;
    if (!relay)
        return;
    tree_fini(&relay->tree);
    bundle_fini(&relay->bundle);
    rank_set_fini(&relay->myself);
    rank_set_fini(&relay->named);
    rank_set_fini(&relay->part);
    rank_set_fini(&relay->subtree);
    free(relay->ranks);
    bytes_fini(&relay->closing_reason);
    free(relay);
    ctx->relay = NULL;
}

static bhvd_status no_memory(bhvd_context *ctx)
{
    return executor_fail(&ctx->exec, BHVD_ERR_SYSTEM, "no memory to negotiate operations");
}

bhvd_status frame_send(bhvd_context *ctx, int rank, enum frame_type type, const struct bytes *payload, bool no_wakeup)
{
    struct link *link = &ctx->exec.connections.links[rank];
    if (link->state != LINK_OPEN)
        return BHVD_OK;                     // it left: it needs no response, and its goodbye ended its requests
    ctx->counters.negotiation_messages++;
    bhvd_status status = link_send_frame(link, type, payload, no_wakeup);
    // A broken connection is noticed when it is read, after a goodbye that may explain it.
    if (status == BHVD_ERR_PEER_LOST)
        return BHVD_OK;
    return status ? executor_fail(&ctx->exec, status, "no memory for a message of %zu bytes to rank %d, or one that is too long",
                                  payload->size, rank) : BHVD_OK;
}

// -------------------------------------------------------------------------------------------------------------- up

static bhvd_status flush_up(bhvd_context *ctx)
{
    struct relay *relay = ctx->relay;
    if (relay->tree.parent < 0 || !bundle_size(&relay->bundle))
        return BHVD_OK;
    // An idle parent has not posted yet: it reads these requests when it posts. It is a member of set 0; for other sets
    // it may have nothing of its own to wait for, so those requests do wake it. So does a rank that leaves.
    const bool no_wakeup = ctx->sets.generation <= 1 && !atomic_load(&ctx->leaving);
    bhvd_status status = frame_send(ctx, relay->tree.parent, FRAME_UP, bundle_write(&relay->bundle), no_wakeup);
    bundle_clear(&relay->bundle);
    return status;
}

static bhvd_status collect(bhvd_context *ctx, const struct rank_set *from, struct bytes_reader items)
{
    struct bundle *bundle = &ctx->relay->bundle;
    bundle_put(bundle, from, items);
    if (bundle_failed(bundle))
        return no_memory(ctx);
    return bundle_size(bundle) >= REQUEST_FRAME_BYTES ? flush_up(ctx) : BHVD_OK;
}

void relay_put_request(bhvd_context *ctx, struct bytes *items, enum item_tag tag, const struct bhvd_operation *op)
{
    ctx->counters.cache_misses++;
    bytes_put_u8(items, (uint8_t)tag);
    bytes_put_u32(items, (uint32_t)op->request.size);
    bytes_put(items, op->request.data, op->request.size);
}

bhvd_status relay_send_requests(bhvd_context *ctx, const struct bytes *items)
{
    const int rank = ctx->options.rank;
    if (items->failed)
        return no_memory(ctx);
    return rank == COORDINATOR ? ctx->relay->receivers->up(ctx, &rank, 1, bytes_read(items))
                               : collect(ctx, &ctx->relay->myself, bytes_read(items));
}

static bhvd_status on_groups(bhvd_context *ctx, const struct link *link, struct bytes_reader r)
{
    struct rank_set *from = &ctx->relay->named;
    const struct tree_child *child = tree_child(&ctx->relay->tree, link->rank);
    while (r.at < r.end) {
        rank_set_take(&r, from);
        const struct bytes_reader group = bytes_take_sub(&r);
        if (r.failed || !child || rank_set_is_empty(from) || !rank_set_contains(&child->below, from))
            return BHVD_ERR_PROTOCOL;
        bhvd_status status;
        if (ctx->options.rank == COORDINATOR) {
            int *ranks = ctx->relay->ranks, count = 0;
            for (int rank = rank_set_next(from, 0); rank >= 0; rank = rank_set_next(from, rank + 1))
                ranks[count++] = rank;
            status = ctx->relay->receivers->up(ctx, ranks, count, group);
        } else {
            status = collect(ctx, from, group);
        }
        if (status)
            return status;
    }
    return BHVD_OK;
}

bhvd_status relay_on_up(bhvd_context *ctx, struct link *link, struct bytes_reader payload)
{
    const int64_t begin_ns = coordinator_time_begin(ctx);
    bhvd_status status = on_groups(ctx, link, payload);
    coordinator_time_end(ctx, begin_ns);
    return status;
}

// ------------------------------------------------------------------------------------------------------------ down

static bhvd_status flush_child(bhvd_context *ctx, struct tree_child *child)
{
    if (child->out.failed)
        return no_memory(ctx);
    if (child->out.size == 0)
        return BHVD_OK;
    const int64_t begin_ns = coordinator_time_begin(ctx);
    bhvd_status status = frame_send(ctx, child->rank, FRAME_DOWN, &child->out, false);
    child->out.size = 0;
    coordinator_time_end(ctx, begin_ns);
    return status;
}

bhvd_status relay_flush(bhvd_context *ctx)
{
    bhvd_status status = BHVD_OK;
    for (int i = 0; i < ctx->relay->tree.child_count && !status; i++)
        status = flush_child(ctx, &ctx->relay->tree.children[i]);
    return status ? status : flush_up(ctx);
}

// receivers NULL: all.
static bhvd_status put_down(bhvd_context *ctx, struct tree_child *child, const struct rank_set *receivers, enum frame_type type,
                            const void *payload, size_t size)
{
    struct bytes *out = &child->out;
    if (receivers)
        rank_set_put(out, receivers);
    else
        bytes_put_u32(out, 0);
    bytes_put_u8(out, (uint8_t)type);
    bytes_put_u32(out, (uint32_t)size);
    bytes_put(out, payload, size);
    return out->size >= REQUEST_FRAME_BYTES || out->failed ? flush_child(ctx, child) : BHVD_OK;
}

// Sends to those receivers that are below this rank. NULL: all.
static bhvd_status pass_down(bhvd_context *ctx, const struct rank_set *receivers, enum frame_type type, const void *payload,
                             size_t size)
{
    struct rank_set *part = &ctx->relay->part;
    bhvd_status status = BHVD_OK;
    for (int i = 0; i < ctx->relay->tree.child_count && !status; i++) {
        struct tree_child *child = &ctx->relay->tree.children[i];
        if (!receivers) {
            status = put_down(ctx, child, NULL, type, payload, size);
            continue;
        }
        rank_set_copy(part, receivers);
        rank_set_intersect(part, &child->below);
        if (!rank_set_is_empty(part))
            status = put_down(ctx, child, part, type, payload, size);
    }
    return status;
}

bhvd_status relay_send_to_set(bhvd_context *ctx, const struct process_set *set, enum frame_type type,
                              const struct bytes *payload)
{
    struct rank_set *receivers = &ctx->relay->named;
    const bool is_all = set->group.size == ctx->options.size;
    if (payload->failed)
        return no_memory(ctx);
    rank_set_clear(receivers);
    for (int i = 0; i < set->group.size && !is_all; i++)
        rank_set_add(receivers, set->group.ranks[i]);
    bhvd_status status = pass_down(ctx, is_all ? NULL : receivers, type, payload->data, payload->size);
    return status || set->group.rank < 0 ? status : ctx->relay->receivers->down(ctx, type, bytes_read(payload));
}

bhvd_status relay_send_to(bhvd_context *ctx, int rank, enum frame_type type, const struct bytes *payload)
{
    if (payload->failed)
        return no_memory(ctx);
    if (rank == ctx->options.rank)
        return ctx->relay->receivers->down(ctx, type, bytes_read(payload));
    struct tree_child *child = tree_child_towards(&ctx->relay->tree, rank);
    struct rank_set *receiver = &ctx->relay->part;
    rank_set_clear(receiver);
    rank_set_add(receiver, rank);
    return put_down(ctx, child, receiver, type, payload->data, payload->size);
}

static bhvd_status on_item(bhvd_context *ctx, struct bytes_reader *r)
{
    struct relay *relay = ctx->relay;
    struct rank_set *receivers = &relay->named;
    rank_set_take(r, receivers);
    enum frame_type type = bytes_take_u8(r);
    const struct bytes_reader payload = bytes_take_sub(r);
    const bool for_all = rank_set_is_empty(receivers), for_this = for_all || rank_set_has(receivers, ctx->options.rank);
    if (r->failed || !rank_set_contains(&relay->subtree, receivers))
        return BHVD_ERR_PROTOCOL;
    bhvd_status status = pass_down(ctx, for_all ? NULL : receivers, type, payload.at, (size_t)(payload.end - payload.at));
    return status || !for_this ? status : relay->receivers->down(ctx, type, payload);
}

bhvd_status relay_on_down(bhvd_context *ctx, struct link *link, struct bytes_reader r)
{
    if (link->rank != ctx->relay->tree.parent)
        return BHVD_ERR_PROTOCOL;
    bhvd_status status = BHVD_OK;
    while (r.at < r.end && !status)
        status = on_item(ctx, &r);
    return status;
}
