#include "core/negotiation/pairwise.h"

#include <stdlib.h>

#include "base/clock.h"
#include "base/status.h"
#include "core/context/context.h"
#include "core/message/frame.h"
#include "core/negotiation/relay.h"
#include "executor/task.h"
#include "primitive/peers.h"
#include "primitive/primitive.h"

enum {
    PAIRWISE_MAX = 1 << 16              // per job: bounds the memory for programs that use ever new names
};

struct neighbor {
    int rank;
    uint32_t ready_number;              // the number of its last pairwise operation
    bool is_revoked;                    // it takes part in no later one,
    int departed;                       // because this rank left; NOBODY_DEPARTED: for another reason
};

struct pairwise_entry {
    struct lru_entry cached;            // its name lies inside request
    struct bytes request;
    struct network_cost network;
    uint32_t number;                    // of this rank's last pairwise operation
    struct neighbor neighbors[PEERS_MAX];
    int count;
    bool is_revoked;                    // then forgotten at the next request for its name; a started operation may continue
    bool is_last;                       // this rank leaves after `number`; its neighbors have been notified
    struct bhvd_operation *op;          // the operation `number`, held, until it has started; NULL: none waits
    int64_t since_ns, warned_ns;
    struct pairwise_entry *next_waiting;
};

// ---------------------------------------------------------------------------------------------------------- the tables

static void entry_free(void *cached)
{
    struct pairwise_entry *entry = cached;
    operation_release(entry->op);
    bytes_fini(&entry->request);
    free(entry);
}

// Removes it from the waiting list. Returns its operation, held.
static struct bhvd_operation *take_out(struct pairwise *pairwise, struct pairwise_entry *entry)
{
    struct bhvd_operation *op = entry->op;
    for (struct pairwise_entry **at = &pairwise->waiting; op && *at; at = &(*at)->next_waiting) {
        if (*at == entry) {
            *at = entry->next_waiting;
            break;
        }
    }
    entry->op = NULL;
    return op;
}

static void forget(bhvd_context *ctx, struct pairwise_entry *entry)
{
    operation_release(take_out(ctx->pairwise, entry));
    lru_remove(&ctx->pairwise->all, &entry->cached);
}

struct pairwise *pairwise_create(void)
{
    struct pairwise *pairwise = calloc(1, sizeof *pairwise);
    if (pairwise)
        pairwise->all.free = entry_free;
    return pairwise;
}

void pairwise_destroy(struct pairwise *pairwise)
{
    if (pairwise)
        lru_fini(&pairwise->all);
    free(pairwise);
}

// --------------------------------------------------------------------------------------------------------------- entries

bool pairwise_try_begin(bhvd_context *ctx, struct process_set *set, const struct request *request)
{
    if ((request->args.kind != BHVD_D_FP_S && request->args.kind != BHVD_D_LP_S) || request->args.device >= 0)
        return false;
    if (request->args.hierarchical &&
        (set->group.rank < 0 || primitive_is_hierarchical(&set->group, request->args.kind, true) || set->group.shared))
        return false;
    if (!request_nbytes(request) || set->group.size == 1 || ctx->pairwise->count == PAIRWISE_MAX)
        return false;
    ctx->pairwise->count++;
    set->pairwise_count++;
    return true;
}

void pairwise_release(bhvd_context *ctx, struct process_set *set, int count)
{
    count = count < set->pairwise_count ? count : set->pairwise_count;
    set->pairwise_count -= count;
    ctx->pairwise->count -= count;
}

bhvd_status pairwise_begin(bhvd_context *ctx, const struct bhvd_operation *op, uint32_t id, const struct network_cost *network)
{
    struct pairwise *pairwise = ctx->pairwise;
    const struct process_set *set = process_set_find(&ctx->sets, op->key.process_set);
    struct pairwise_entry *entry = lru_find(&pairwise->all, &op->key);
    if (entry)
        forget(ctx, entry);
    entry = calloc(1, sizeof *entry);
    if (!entry || !set) {
        free(entry);
        return set ? BHVD_ERR_SYSTEM : BHVD_OK;
    }
    *entry = (struct pairwise_entry){.cached = {.id = id}, .network = *network};
    const struct peers peers = primitive_peers(&op->coll, set->group.size, set->group.rank);
    for (int p = 0; p < peers.count; p++)
        entry->neighbors[entry->count++].rank = set->group.ranks[peers.index[p]];
    if (lru_copy_request(&entry->cached, &entry->request, &op->request) && lru_insert(&pairwise->all, &entry->cached))
        return BHVD_OK;
    entry_free(entry);
    return BHVD_ERR_SYSTEM;
}

static bool is_same(const struct pairwise_entry *entry, const struct bhvd_operation *op)
{
    return !collective_is_on_gpu(&op->coll) && entry->request.size == op->request.size &&
           memcmp(entry->request.data, op->request.data, op->request.size) == 0;
}

// Sends the id, `number`, and of a REVOKE the rank that left. An error has failed the executor and ended all operations: only
// those that the caller holds still exist.
static bhvd_status signal_neighbors(bhvd_context *ctx, const struct pairwise_entry *entry, enum frame_type type, uint32_t number,
                                    int departed)
{
    bhvd_status status = BHVD_OK;
    struct bytes out = {0};
    bytes_put_u32(&out, entry->cached.id);
    bytes_put_u32(&out, number);
    if (type == FRAME_PAIRWISE_REVOKE)
        bytes_put_u32(&out, (uint32_t)departed);
    for (int i = 0; i < entry->count && !status; i++)               // READY need not wake idle ranks
        status = frame_send(ctx, entry->neighbors[i].rank, type, &out, type == FRAME_PAIRWISE_READY);
    bytes_fini(&out);
    return status;
}

// Revokes the entry. An operation that waits for its neighbors is the last under this id. The next one is requested in full from
// the coordinator and gets another id, so late frames of neighbors cannot be mistaken for it. departed: the rank whose departure is
// the reason; NOBODY_DEPARTED: another reason.
static bhvd_status revoke_entry(bhvd_context *ctx, struct pairwise_entry *entry, int departed)
{
    const bhvd_status status = signal_neighbors(ctx, entry, FRAME_PAIRWISE_REVOKE, entry->number, departed);
    struct cache_entry *own = lru_find(&ctx->cache.own, &entry->cached.key);
    if (own && !own->cached.user)
        lru_remove(&ctx->cache.own, &own->cached);
    entry->is_revoked = true;
    return status;
}

// Does a neighbor take no part in the next one? *departed: as of struct neighbor.
static bool someone_is_gone(const bhvd_context *ctx, const struct pairwise_entry *entry, int *departed)
{
    for (int i = 0; i < entry->count; i++) {
        const struct neighbor *neighbor = &entry->neighbors[i];
        const bool takes_part = neighbor->ready_number > entry->number;     // in the next one
        const bool is_open = ctx->exec.connections.links[neighbor->rank].state == LINK_OPEN;
        if (is_open && (!neighbor->is_revoked || takes_part))
            continue;
        *departed = is_open ? neighbor->departed : neighbor->rank;
        return true;
    }
    return false;
}

enum pairwise_state pairwise_post(bhvd_context *ctx, struct bhvd_operation *op)
{
    struct pairwise_entry *entry = lru_find(&ctx->pairwise->all, &op->key);
    if (!entry)
        return PAIRWISE_NONE;
    if (entry->is_revoked) {
        forget(ctx, entry);
        return PAIRWISE_NONE;
    }
    int departed = NOBODY_DEPARTED;
    if (!is_same(entry, op) || someone_is_gone(ctx, entry, &departed)) {
        const bhvd_status status = revoke_entry(ctx, entry, departed);
        forget(ctx, entry);
        return status ? PAIRWISE_FAILED : PAIRWISE_REVOKED;
    }
    if (signal_neighbors(ctx, entry, FRAME_PAIRWISE_READY, ++entry->number, NOBODY_DEPARTED))
        return PAIRWISE_FAILED;
    ctx->counters.cache_hits++;
    atomic_fetch_add(&op->references, 1);
    op->is_pairwise = true;
    entry->op = op;
    entry->since_ns = entry->warned_ns = clock_now_ns();
    entry->next_waiting = ctx->pairwise->waiting;
    ctx->pairwise->waiting = entry;
    ctx->pairwise->changed = true;
    return PAIRWISE_WAITS;
}

bhvd_status pairwise_revoke(bhvd_context *ctx, const uint32_t *process_set, int departed)
{
    bhvd_status status = BHVD_OK;
    for (struct lru_entry *cached = ctx->pairwise->all.oldest; cached && !status; cached = cached->newer) {
        struct pairwise_entry *entry = (struct pairwise_entry *)cached;
        if (!entry->is_revoked && (!process_set || cached->key.process_set == *process_set))
            status = revoke_entry(ctx, entry, departed);
    }
    return status;
}

void pairwise_forget_set(bhvd_context *ctx, uint32_t process_set)
{
    for (struct lru_entry *cached = ctx->pairwise->all.oldest, *newer; cached; cached = newer) {
        newer = cached->newer;
        if (cached->key.process_set == process_set)
            forget(ctx, (struct pairwise_entry *)cached);
    }
}

// ---------------------------------------------------------------------------------------------------------- neighbors

static struct neighbor *neighbor_of(struct pairwise_entry *entry, int rank)
{
    for (int i = 0; entry && i < entry->count; i++)
        if (entry->neighbors[i].rank == rank)
            return &entry->neighbors[i];
    return NULL;
}

bhvd_status pairwise_on_ready(bhvd_context *ctx, struct link *link, struct bytes_reader payload)
{
    const uint32_t id = bytes_take_u32(&payload), number = bytes_take_u32(&payload);
    struct pairwise_entry *entry = lru_find_id(&ctx->pairwise->all, id);
    struct neighbor *neighbor = neighbor_of(entry, link->rank);
    if (payload.failed || payload.at != payload.end || (entry && !neighbor))
        return BHVD_ERR_PROTOCOL;
    // This rank has revoked it, and has sent that. A READY cannot come before the response that makes the operation pairwise: the
    // neighbor posts it again only after the execution of that response, in which it exchanged values with this rank.
    if (!entry)
        return BHVD_OK;
    if (number != neighbor->ready_number + 1 || neighbor->is_revoked)
        return BHVD_ERR_PROTOCOL;
    neighbor->ready_number = number;
    ctx->pairwise->changed = true;
    return BHVD_OK;
}

// Ends the wait for the neighbors. Tells the neighbors, since one of them may have started it. Returns it, held.
static struct bhvd_operation *cancel_wait(bhvd_context *ctx, struct pairwise_entry *entry, int departed)
{
    struct bhvd_operation *op = take_out(ctx->pairwise, entry);
    entry->number--;
    revoke_entry(ctx, entry, departed);
    forget(ctx, entry);
    return op;
}

// Requests the waiting operation from the coordinator, as a rank does that has revoked it.
static bhvd_status fall_back_to_coordinator(bhvd_context *ctx, struct pairwise_entry *entry, int departed)
{
    struct bhvd_operation *op = cancel_wait(ctx, entry, departed);
    bhvd_status status = BHVD_OK;
    struct bytes out = {0};
    if (!operation_is_complete(op) && ctx->closing.status) {
        operation_complete(op, &ctx->closing);  // the coordinator has left
    } else if (!operation_is_complete(op) && !atomic_load(&ctx->leaving)) {   // else this rank leaves, which ends it
        op->is_pairwise = false;
        relay_put_request(ctx, &out, ITEM_REVOKED, op);
        status = relay_send_requests(ctx, &out);
    }
    bytes_fini(&out);
    operation_release(op);
    return status;
}

bhvd_status pairwise_on_revoke(bhvd_context *ctx, struct link *link, struct bytes_reader payload)
{
    const uint32_t id = bytes_take_u32(&payload), last = bytes_take_u32(&payload);
    const int departed = (int32_t)bytes_take_u32(&payload);
    struct pairwise_entry *entry = lru_find_id(&ctx->pairwise->all, id);
    struct neighbor *neighbor = neighbor_of(entry, link->rank);
    if (payload.failed || payload.at != payload.end || (entry && !neighbor) || departed < NOBODY_DEPARTED ||
        departed >= ctx->options.size)
        return BHVD_ERR_PROTOCOL;
    if (!entry)
        return BHVD_OK;
    const uint32_t started = entry->number - (entry->op != NULL);
    if (started > last && departed != NOBODY_DEPARTED)
        return executor_blame(&ctx->exec, BHVD_ERR_PEER_LOST, BHVD_CAUSE_LEFT, departed,
                              "rank %d left the job before rank %d could begin '%.*s', which rank %d has begun", departed,
                              link->rank, (int)entry->cached.key.name_size, entry->cached.key.name,
                              ctx->options.rank);
    if (started > last)
        return executor_fail(&ctx->exec, BHVD_ERR_MISMATCH,
                             "rank %d does not take part in '%.*s', which rank %d has already started: a rank has joined, the "
                             "process set was removed too early, or ranks call it with different arguments. Give each "
                             "variant its own name.", link->rank, (int)entry->cached.key.name_size, entry->cached.key.name,
                             ctx->options.rank);
    neighbor->is_revoked = true;
    neighbor->departed = departed;
    neighbor->ready_number = last;
    if (departed == link->rank && entry->number < last && !entry->is_revoked)
        revoke_entry(ctx, entry, departed);         // the leaving rank waits for READY or for this
    return entry->op && entry->number > last ? fall_back_to_coordinator(ctx, entry, departed) : BHVD_OK;
}

void pairwise_on_goodbye(bhvd_context *ctx, int rank)
{
    for (struct pairwise_entry *entry = ctx->pairwise->waiting, *next; entry; entry = next) {
        const struct neighbor *neighbor = neighbor_of(entry, rank);
        next = entry->next_waiting;
        if (!neighbor || neighbor->ready_number >= entry->number)
            continue;
        struct bhvd_error error;
        struct bhvd_operation *op = cancel_wait(ctx, entry, rank);
        reason_departed(&error, rank);
        if (!operation_is_complete(op))
            operation_complete(op, &error);
        operation_release(op);
    }
}

void pairwise_leave(bhvd_context *ctx)
{
    for (struct pairwise_entry *entry = ctx->pairwise->waiting; entry; entry = entry->next_waiting) {
        if (!entry->is_last)
            revoke_entry(ctx, entry, ctx->options.rank);        // again, if it has another reason: only to this one they respond
        entry->is_last = true;
    }
}

bool pairwise_set_waits(const bhvd_context *ctx, uint32_t process_set)
{
    const struct pairwise_entry *entry = ctx->pairwise->waiting;
    while (entry && entry->cached.key.process_set != process_set)
        entry = entry->next_waiting;
    return entry;
}

// -------------------------------------------------------------------------------------------------------------- starts

// The rank of a neighbor that has not posted it yet; -1: none.
static int first_missing(const struct pairwise_entry *entry)
{
    for (int i = 0; i < entry->count; i++)
        if (entry->neighbors[i].ready_number < entry->number)
            return entry->neighbors[i].rank;
    return -1;
}

struct bhvd_operation *pairwise_next(bhvd_context *ctx, uint32_t *id, struct network_cost *network)
{
    bool waits = false;
    for (struct pairwise_entry *entry = ctx->pairwise->waiting; entry; entry = entry->next_waiting) {
        const bool is_over = operation_is_complete(entry->op);
        if (!is_over && first_missing(entry) >= 0)
            continue;
        if (!is_over && tasks_use_memory(&ctx->exec, collective_exclusive_memory(&entry->op->coll))) {
            waits = true;                       // check again when that one is over
            continue;
        }
        struct bhvd_operation *op = take_out(ctx->pairwise, entry);
        *id = entry->cached.id;
        *network = entry->network;
        return op;
    }
    ctx->pairwise->changed = waits;
    return NULL;
}

// ------------------------------------------------------------------------------------------------------------- waiting

void pairwise_check_stalls(bhvd_context *ctx)
{
    const int64_t warning_ns = clock_ms_ns(ctx->options.stall_warning_ms),
                  shutdown_ns = clock_ms_ns(ctx->options.stall_shutdown_ms);
    if (!ctx->pairwise->waiting || warning_ns <= 0)
        return;
    const int64_t now_ns = clock_now_ns();
    if (now_ns < ctx->pairwise->next_check_ns)
        return;
    ctx->pairwise->next_check_ns = now_ns + STALL_CHECK_NS;
    for (struct pairwise_entry *entry = ctx->pairwise->waiting; entry; entry = entry->next_waiting) {
        const int missing = first_missing(entry);
        const int64_t waited_ns = now_ns - entry->since_ns;
        if (missing < 0 || waited_ns < warning_ns)
            continue;
        if (now_ns - entry->warned_ns >= warning_ns) {
            entry->warned_ns = now_ns;
            log_write(ctx, BHVD_LOG_WARNING, "'%.*s' has waited for rank %d for more than %.0f seconds: it has not requested it as "
                      "often as this rank.", (int)entry->cached.key.name_size, entry->cached.key.name, missing,
                      (double)waited_ns / 1e9);
        }
        if (shutdown_ns > 0 && waited_ns >= shutdown_ns) {
            executor_blame(&ctx->exec, BHVD_ERR_TIMEOUT, BHVD_CAUSE_TIMEOUT, missing,
                           "'%.*s' waits for rank %d for longer than %lld seconds (HOROVOD_STALL_SHUTDOWN_TIME_SECONDS).",
                           (int)entry->cached.key.name_size, entry->cached.key.name, missing,
                           (long long)(shutdown_ns / 1000000000));
            return;
        }
    }
}
