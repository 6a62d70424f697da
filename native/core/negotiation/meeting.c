#include "core/negotiation/meeting.h"

#include <stdlib.h>

#include "base/clock.h"
#include "base/status.h"
#include "core/context/context.h"
#include "core/negotiation/announce.h"
#include "core/negotiation/send.h"
#include "core/message/reason.h"
#include "primitive/peers.h"
#include "primitive/primitive.h"
#include "run/executor.h"

enum {
    STANDING_MAX = 1 << 16,             // of a job: a program with ever new names does not fill the memory
    LOOK_EVERY_NS = 1000000000
};

struct neighbour {
    int rank;
    uint32_t said;                      // the number of its last meeting
    bool has_parted;
    uint32_t last;                      // then: the last that it takes part in
};

struct standing {
    struct cached agreement;            // its name lies inside request
    struct bytes request;
    struct wire wire;
    uint32_t number;                    // of the last meeting of this rank
    struct neighbour neighbours[PEERS_MAX];
    int count;
    bool has_parted;                    // and is forgotten when its last meeting has started
    struct bhvd_handle *op;             // of that meeting, held, until it has started; NULL: none waits
    int64_t since_ns, warned_ns;
    struct standing *next_waiting;
};

// ---------------------------------------------------------------------------------------------------------- the tables

// A standing begins with what all agreements have.
static struct standing *standing_of(struct cached *agreement) { return (struct standing *)agreement; }

static struct standing *find(const struct meetings *meetings, const struct operation_key *key)
{
    return meetings->all.oldest ? standing_of(cached_list_find(&meetings->all, key)) : NULL;
}

static struct standing *find_id(const struct meetings *meetings, uint32_t id)
{
    return standing_of(cached_list_find_id(&meetings->all, id));
}

static void standing_free(struct standing *standing)
{
    operation_drop(standing->op);
    bytes_fini(&standing->request);
    free(standing);
}

static void wait_for_neighbours(struct meetings *meetings, struct standing *standing, struct bhvd_handle *op)
{
    atomic_fetch_add(&op->references, 1);
    op->meets = true;
    standing->op = op;
    standing->since_ns = standing->warned_ns = clock_now_ns();
    standing->next_waiting = meetings->waiting;
    meetings->waiting = standing;
    meetings->changed = true;
}

// Takes it out of those that wait. Returns its operation, held.
static struct bhvd_handle *take_out(struct meetings *meetings, struct standing *standing)
{
    struct bhvd_handle *op = standing->op;
    for (struct standing **at = &meetings->waiting; op && *at; at = &(*at)->next_waiting) {
        if (*at == standing) {
            *at = standing->next_waiting;
            break;
        }
    }
    standing->op = NULL;
    return op;
}

static void forget_agreement(struct cached_list *list, struct cached *agreement)
{
    cached_list_remove(list, agreement);
    standing_free(standing_of(agreement));
}

static void forget(struct meetings *meetings, struct standing *standing)
{
    operation_drop(take_out(meetings, standing));
    forget_agreement(&meetings->all, &standing->agreement);
}

struct meetings *meetings_create(void) { return calloc(1, sizeof(struct meetings)); }

void meetings_destroy(struct meetings *meetings)
{
    if (meetings)
        cached_list_fini(&meetings->all, forget_agreement);
    free(meetings);
}

// ------------------------------------------------------------------------------------------------------------ standing

bool meetings_may_stand(bhvd_context *ctx, struct process_set *set, const struct request *request)
{
    if ((request->kind != BHVD_D_FP_S && request->kind != BHVD_D_LP_S) || request->device >= 0)
        return false;
    if (request->hierarchical &&
        (set->group.rank < 0 || primitive_has_levels(&set->group, request->kind, true) || set->group.shared))
        return false;
    if (!request_nbytes(request) || set->group.size == 1 || ctx->meetings->agreed == STANDING_MAX)
        return false;
    ctx->meetings->agreed++;
    set->persistent++;
    return true;
}

void meetings_release(bhvd_context *ctx, struct process_set *set, int count)
{
    count = count < set->persistent ? count : set->persistent;
    set->persistent -= count;
    ctx->meetings->agreed -= count;
}

static struct peers peers_of_work(const struct work *work, const struct group *group)
{
    const bhvd_topology topology = work->kind == BHVD_D_LP_S ? BHVD_TOPOLOGY_RING : work->topology;
    return peers_of(topology, group->size, group->rank, work->round);
}

bhvd_status meetings_agree(bhvd_context *ctx, const struct bhvd_handle *op, uint32_t id, const struct wire *wire)
{
    struct meetings *meetings = ctx->meetings;
    const struct operation_key key = operation_key_of(op);
    const struct process_set *set = process_set_find(&ctx->sets, op->process_set);
    struct standing *standing = find(meetings, &key);
    if (standing)
        forget(meetings, standing);
    standing = calloc(1, sizeof *standing);
    if (!standing || !set) {
        free(standing);
        return set ? context_fail(ctx, BHVD_ERR_SYSTEM, "no memory to agree on an operation") : BHVD_OK;
    }
    *standing = (struct standing){.agreement = {.id = id}, .wire = *wire};
    const struct peers peers = peers_of_work(&op->work, &set->group);
    for (int p = 0; p < peers.count; p++)
        standing->neighbours[standing->count++].rank = set->group.ranks[peers.index[p]];
    bytes_put(&standing->request, op->request.data, op->request.size);
    if (!standing->request.failed) {
        const char *name = (const char *)standing->request.data + (op->work.name - (const char *)op->request.data);
        standing->agreement.key = (struct operation_key){key.process_set, key.name_size, name};
        if (cached_list_insert(&meetings->all, &standing->agreement))
            return BHVD_OK;
    }
    standing_free(standing);
    return context_fail(ctx, BHVD_ERR_SYSTEM, "no memory to agree on an operation");
}

static bool is_same(const struct standing *standing, const struct bhvd_handle *op)
{
    return !op->on_gpu && standing->request.size == op->request.size &&
           memcmp(standing->request.data, op->request.data, op->request.size) == 0;
}

static void tell_neighbours(bhvd_context *ctx, const struct standing *standing, enum frame_type type, uint32_t number)
{
    struct bytes out = {0};
    bytes_put_u32(&out, standing->agreement.id);
    bytes_put_u32(&out, number);
    for (int i = 0; i < standing->count; i++)
        frame_send(ctx, standing->neighbours[i].rank, type, &out, type == FRAME_MEET);    // who has not posted reads it then
    bytes_fini(&out);
}

// What waits still meets its neighbours, and is the last. The name is asked for in full next time, which gives it another id: what
// neighbours have still to read is not about that.
static void part(bhvd_context *ctx, struct standing *standing)
{
    if (!standing->has_parted) {
        struct cache_entry *entry = response_cache_find(ctx->cache, &standing->agreement.key);
        tell_neighbours(ctx, standing, FRAME_PART, standing->number);
        if (entry && !entry->cached.user)
            response_cache_forget(ctx->cache, entry);
    }
    standing->has_parted = true;
    if (!standing->op)
        forget(ctx->meetings, standing);
}

static bool someone_is_gone(const bhvd_context *ctx, const struct standing *standing)
{
    for (int i = 0; i < standing->count; i++) {
        const struct neighbour *neighbour = &standing->neighbours[i];
        if (neighbour->has_parted || ctx->run.connections.links[neighbour->rank].state != LINK_OPEN)
            return true;
    }
    return false;
}

enum meeting_way meetings_take(bhvd_context *ctx, struct bhvd_handle *op)
{
    const struct operation_key key = operation_key_of(op);
    struct standing *standing = find(ctx->meetings, &key);
    if (!standing)
        return MEETING_NONE;
    if (standing->has_parted || !is_same(standing, op) || someone_is_gone(ctx, standing)) {
        part(ctx, standing);
        return MEETING_PARTED;
    }
    tell_neighbours(ctx, standing, FRAME_MEET, ++standing->number);
    ctx->counters.cache_hits++;
    wait_for_neighbours(ctx->meetings, standing, op);
    return MEETING_TAKEN;
}

void meetings_part(bhvd_context *ctx)
{
    for (struct cached *agreement = ctx->meetings->all.oldest, *newer; agreement; agreement = newer) {
        newer = agreement->newer;
        part(ctx, standing_of(agreement));
    }
}

// ---------------------------------------------------------------------------------------------------------- neighbours

static struct neighbour *neighbour_of(struct standing *standing, int rank)
{
    for (int i = 0; standing && i < standing->count; i++)
        if (standing->neighbours[i].rank == rank)
            return &standing->neighbours[i];
    return NULL;
}

bhvd_status meetings_take_meet(bhvd_context *ctx, struct link *link, struct bytes_reader payload)
{
    const uint32_t id = bytes_take_u32(&payload), number = bytes_take_u32(&payload);
    struct standing *standing = find_id(ctx->meetings, id);
    struct neighbour *neighbour = neighbour_of(standing, link->rank);
    if (payload.failed || payload.at != payload.end || (standing && !neighbour))
        return BHVD_ERR_SYSTEM;
    if (!standing)
        return BHVD_OK;                     // this rank has parted, and said so
    if (number != neighbour->said + 1 || neighbour->has_parted)
        return BHVD_ERR_SYSTEM;
    neighbour->said = number;
    ctx->meetings->changed = true;
    return BHVD_OK;
}

// The operation that waits there is to be asked for, as by one that has parted.
static bhvd_status ask_instead(bhvd_context *ctx, struct standing *standing)
{
    struct bhvd_handle *op = take_out(ctx->meetings, standing);
    standing->number--;
    part(ctx, standing);
    op->meets = false;
    bhvd_status status = operation_is_over(op) ? BHVD_OK : announce_parted(ctx, op);
    operation_drop(op);
    return status;
}

bhvd_status meetings_take_part(bhvd_context *ctx, struct link *link, struct bytes_reader payload)
{
    const uint32_t id = bytes_take_u32(&payload), last = bytes_take_u32(&payload);
    struct standing *standing = find_id(ctx->meetings, id);
    struct neighbour *neighbour = neighbour_of(standing, link->rank);
    if (payload.failed || payload.at != payload.end || (standing && !neighbour))
        return BHVD_ERR_SYSTEM;
    if (!standing)
        return BHVD_OK;
    const uint32_t started = standing->number - (standing->op != NULL);
    if (started > last)
        return context_fail(ctx, BHVD_ERR_MISMATCH, "rank %d takes no part in '%.*s', for which rank %d has begun to exchange "
                            "with it: ranks ask for this operation in different ways. Give each way a name of its own.",
                            link->rank, (int)standing->agreement.key.name_size, standing->agreement.key.name, ctx->options.rank);
    neighbour->has_parted = true;
    neighbour->said = last;
    return standing->op && standing->number > last ? ask_instead(ctx, standing) : BHVD_OK;
}

void meetings_take_goodbye(bhvd_context *ctx, int rank)
{
    for (struct standing *standing = ctx->meetings->waiting, *next; standing; standing = next) {
        const struct neighbour *neighbour = neighbour_of(standing, rank);
        next = standing->next_waiting;
        if (!neighbour || neighbour->said >= standing->number)
            continue;
        struct bhvd_error error;
        struct bhvd_handle *op = take_out(ctx->meetings, standing);
        reason_left(&error, rank);
        if (!operation_is_over(op))
            operation_end(op, &error);
        operation_drop(op);
    }
}

void meetings_forget_set(bhvd_context *ctx, uint32_t process_set)
{
    for (struct cached *agreement = ctx->meetings->all.oldest, *newer; agreement; agreement = newer) {
        newer = agreement->newer;
        if (agreement->key.process_set == process_set)
            forget(ctx->meetings, standing_of(agreement));
    }
}

// -------------------------------------------------------------------------------------------------------------- starts

static bool all_are_there(const struct standing *standing)
{
    for (int i = 0; i < standing->count; i++)
        if (standing->neighbours[i].said < standing->number)
            return false;
    return true;
}

struct bhvd_handle *meetings_next(bhvd_context *ctx, uint32_t *id, struct wire *wire)
{
    bool waits = false;
    for (struct standing *standing = ctx->meetings->waiting; standing; standing = standing->next_waiting) {
        const bool is_over = operation_is_over(standing->op);
        if (!is_over && !all_are_there(standing))
            continue;
        if (!is_over && executor_has_state(&ctx->run, work_state(&standing->op->work))) {
            waits = true;                       // once more when that is over
            continue;
        }
        struct bhvd_handle *op = take_out(ctx->meetings, standing);
        *id = standing->agreement.id;
        *wire = standing->wire;
        if (standing->has_parted)
            forget(ctx->meetings, standing);
        return op;
    }
    ctx->meetings->changed = waits;
    return NULL;
}

// ------------------------------------------------------------------------------------------------------------- waiting

static int first_missing(const struct standing *standing)
{
    for (int i = 0; i < standing->count; i++)
        if (standing->neighbours[i].said < standing->number)
            return standing->neighbours[i].rank;
    return -1;
}

void meetings_look(bhvd_context *ctx)
{
    const int64_t warning_ns = (int64_t)ctx->options.stall_warning_ms * 1000000,
                  shutdown_ns = (int64_t)ctx->options.stall_shutdown_ms * 1000000;
    if (!ctx->meetings->waiting || warning_ns <= 0)
        return;
    const int64_t now_ns = clock_now_ns();
    if (now_ns < ctx->meetings->next_look_ns)
        return;
    ctx->meetings->next_look_ns = now_ns + LOOK_EVERY_NS;
    for (struct standing *standing = ctx->meetings->waiting; standing; standing = standing->next_waiting) {
        const int missing = first_missing(standing);
        if (missing < 0 || now_ns - standing->warned_ns < warning_ns)
            continue;
        standing->warned_ns = now_ns;
        log_say(ctx, BHVD_LOG_WARNING, "'%.*s' has waited for rank %d for more than %.0f seconds: it has not asked for it as "
                "often as this rank.", (int)standing->agreement.key.name_size, standing->agreement.key.name, missing,
                (double)(now_ns - standing->since_ns) / 1e9);
        if (shutdown_ns > 0 && now_ns - standing->since_ns >= shutdown_ns) {
            run_blame(&ctx->run, BHVD_ERR_TIMEOUT, BHVD_CAUSE_TIMEOUT, missing,
                      "'%.*s' waits for rank %d for longer than %lld seconds (HOROVOD_STALL_SHUTDOWN_TIME_SECONDS).",
                      (int)standing->agreement.key.name_size, standing->agreement.key.name, missing, (long long)(shutdown_ns / 1000000000));
            return;
        }
    }
}
