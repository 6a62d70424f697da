// Decides which process sets use NCCL, and manages their communicators.
#include "gpu/nccl.h"

#include <sched.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/dtype.h"
#include "base/status.h"
#include "collective/collectives.h"
#include "collective/schedules.h"
#include "device/nccl_library.h"
#include "executor/hierarchy.h"
#include "gpu/device_encoder.h"
#include "gpu/staging.h"
#include "primitive/primitive.h"

enum {
    CLOSE_MS = 5000,                    // for pending work on the GPU, and for the peers to close too
    NCCL_GROUPS_ABORTS = 22200,         // from this version on, aborts in one group wait for each other
    ABORTS_MAX = 2048                   // two communicators for each process set
};

// A member's capabilities, in the same byte layout on all hosts.
struct member {
    uint8_t uuid[DEVICE_UUID_BYTES];
    int32_t version;                    // of NCCL; 0: not usable
    uint8_t scales, encodes, two_level, zero;   // two_level: enum nccl_two_level
};

struct nccl_facts nccl_facts_of(const struct nccl_group *group, const struct group *set, bhvd_kind kind, bool hierarchical)
{
    struct nccl_facts facts = {.is_hierarchical = primitive_is_hierarchical(set, kind, hierarchical), .device = -1};
    if (!group || !(group->is_on || group->two_level))
        return facts;
    facts.is_on = group->is_on;
    facts.two_level = group->two_level;
    facts.scales = group->scales;
    facts.encodes = group->encodes;
    facts.device = (group->is_on ? group : group->local)->device->index;
    return facts;
}

// NCCL has no 16-bit integers and no bool; integers are scaled on the CPU only. If two-level, the CPU does the final scaling.
static bool reduces(const struct collective *coll, bool scales, bool two_level)
{
    const bool averaged = coll->op == BHVD_OP_AVERAGE || coll->postscale_factor != 1.0;
    const bool scaled = coll->prescale_factor != 1.0 || (averaged && !two_level);
    for (size_t t = 0; t < coll->tensor_count; t++) {
        const bhvd_dtype dtype = coll->tensors[t].dtype;
        if (dtype == BHVD_UINT16 || dtype == BHVD_INT16 || dtype == BHVD_BOOL)
            return false;
        if (scaled && !(scales && dtype_is_floating(dtype)))
            return false;
    }
    return coll->op != BHVD_OP_ADASUM;
}

enum nccl_path nccl_path_of(const struct nccl_facts *facts, const struct collective *coll)
{
    const bool allowed = coll->kind == BHVD_ALLREDUCE || (coll->kind == BHVD_BROADCAST && !facts->is_on);
    const bool two_level = facts->two_level && allowed;
    const enum nccl_path path = two_level ? PATH_TWO_LEVEL : facts->is_on ? PATH_NCCL : PATH_HOST;
    switch (coll->kind) {
    case BHVD_ALLREDUCE:
    case BHVD_REDUCESCATTER:
        return reduces(coll, facts->scales, two_level) ? path : PATH_HOST;
    case BHVD_BROADCAST:
    case BHVD_ALLGATHER:
    case BHVD_ALLTOALL:
        return path;
    case BHVD_C_LP_S:
    case BHVD_D_LP_S:
        return facts->is_on && facts->encodes && !facts->is_hierarchical &&
               device_encoder_supports(coll->codec, coll->tensors[0].dtype)
                   ? PATH_NCCL : PATH_HOST;
    default:
        return PATH_HOST;
    }
}

bhvd_status nccl_check_gpu(const struct nccl_facts *facts, const struct bhvd_args *args, struct bhvd_error *error)
{
    if (facts->device < 0 || facts->device == args->gpu->index)
        return BHVD_OK;
    return error_set(error, BHVD_ERR_UNSUPPORTED, "'%s' is on GPU %d, but this rank's process set communicates by NCCL on GPU "
                     "%d: keep to one GPU, or set BAGUA_HVD_NCCL=0", args->name, args->gpu->index, facts->device);
}

// ------------------------------------------------------------------------------------------------------- agreement

static struct member member_of(const struct collective *coll, int two_level)
{
    struct member member = {.two_level = (uint8_t)two_level};
    const struct bhvd_device *device = coll->staging ? coll->staging->device : NULL;
    if (!device || !device->nccl)
        return member;
    memcpy(member.uuid, device->uuid, sizeof member.uuid);
    member.version = device->nccl->version;
    member.scales = true;
    for (int type = 0; type < DEVICE_TYPES; type++)
        member.scales &= device_kernel(device, BHVD_DEVICE_SCALE, type) != NULL;
    member.encodes = member.scales;
    for (int i = 0; i < (BHVD_DEVICE_KERNEL_COUNT - BHVD_DEVICE_FEED_ERROR) * DEVICE_TYPES; i++)
        member.encodes &= device_kernel(device, BHVD_DEVICE_FEED_ERROR + i / DEVICE_TYPES, i % DEVICE_TYPES) != NULL;
    return member;
}

// Whether the members at these positions can use NCCL, and no two share a GPU. positions NULL: the first `count`.
static bool can(const struct member *members, const int *positions, int count)
{
    for (int i = 0; i < count; i++) {
        const struct member *a = &members[positions ? positions[i] : i];
        if (!a->version || a->version != members[positions ? positions[0] : 0].version)
            return false;
        for (int j = 0; j < i; j++) {
            if (memcmp(a->uuid, members[positions ? positions[j] : j].uuid, sizeof a->uuid) == 0)
                return false;
        }
    }
    return true;
}

static bool hosts_can(const struct member *members, const struct hierarchy *h)
{
    for (int host = 0; h && host < h->hosts; host++) {
        if (!can(members, h->members + h->first[host], hierarchy_members_of(h, host)))
            return false;
    }
    return h != NULL;
}

// Computes the decision that all members share.
static void decide(const struct member *members, const struct group *set, struct nccl_group *group)
{
    int two_level = TWO_LEVEL_WHERE_NEEDED;
    group->scales = group->encodes = true;
    for (int i = 0; i < set->size; i++) {
        two_level = members[i].two_level > two_level ? members[i].two_level : two_level;
        group->scales &= members[i].scales != 0;
        group->encodes &= members[i].encodes != 0;
    }
    group->is_on = can(members, NULL, set->size) && !(set->hierarchy && two_level == TWO_LEVEL_ONLY);
    group->two_level = (!group->is_on || two_level != TWO_LEVEL_WHERE_NEEDED) && hosts_can(members, set->hierarchy);
}

// Sends every member's bytes to all, over the CPU transports.
static bhvd_status exchange(struct executor *exec, struct group *set, const void *mine, void *all, size_t nbytes)
{
    struct plan plan = {0};
    size_t *part = malloc((size_t)set->size * sizeof *part);
    if (!part)
        return executor_fail(exec, BHVD_ERR_SYSTEM, "no memory for a collective of %d ranks", set->size);
    for (int i = 0; i < set->size; i++)
        part[i] = nbytes;
    struct span whole = {NULL, all, nbytes * (size_t)set->size};
    bhvd_status status = BHVD_OK;
    if (set->shared)
        status = allgather_shared(exec, set, mine, &(struct span_list){&whole, 1, 1, whole.nbytes}, part);
    else
        allgather_schedule(plan_begin(&plan, set), &exec->network, part);
    free(part);
    plan.operands = (struct operands){.input = mine, .output = all};
    return plan.is_planned ? plan_execute(exec, &plan) : status;
}

static bhvd_status share(struct executor *exec, struct group *set, void *bytes, size_t nbytes)
{
    struct plan plan = {0};
    if (set->shared)
        return broadcast_shared(exec, set, 0, bytes, bytes, nbytes);
    broadcast_plan(&plan, set, 0, bytes, bytes, nbytes, false);
    return plan_execute(exec, &plan);
}

// Creates the communicator: the first member makes its id, all join it.
static bhvd_status join(struct executor *exec, struct group *set, struct nccl_group *group, struct bhvd_device *device)
{
    device_hold(device);
    group->device = device;
    const struct nccl *nccl = device->nccl;
    int code = device->ops->event_create(device, &group->done);
    if (code)
        return executor_fail(exec, BHVD_ERR_SYSTEM, "GPU %d cannot be used by NCCL", device->index);
    struct {
        int32_t result;
        struct nccl_unique_id id;
    } first = {NCCL_SUCCESS, {{0}}};
    if (set->rank == 0)
        first.result = nccl->get_unique_id(&first.id);
    bhvd_status status = share(exec, set, &first, sizeof first);
    if (status)
        return status;
    if (first.result)
        return nccl_failed(exec, group, first.result, "rank 0 of the process set cannot create the communicator's id");
    code = device->ops->enter(device);
    if (code)
        return executor_fail(exec, BHVD_ERR_SYSTEM, "GPU %d cannot be used by NCCL", device->index);
    struct nccl_config config = NCCL_CONFIG_UNBLOCKED;
    nccl_result result = nccl->comm_init(&group->comm, set->size, first.id, set->rank, &config);
    device->ops->leave(device);
    if (result != NCCL_SUCCESS && result != NCCL_IN_PROGRESS)
        return nccl_failed(exec, group, result, "cannot create its communicator");
    return nccl_settle(exec, group);
}

bhvd_status nccl_agree(struct executor *exec, struct group *set, const struct collective *coll, int two_level,
                       struct nccl_group **out)
{
    const struct member mine = member_of(coll, two_level);
    struct nccl_group *local = calloc(1, sizeof *local);
    struct nccl_group *group = *out = calloc(1, sizeof *group);
    struct member *members = malloc((size_t)set->size * sizeof *members);
    if (!group || !local || !members) {
        free(local);
        free(group);
        free(members);
        *out = NULL;
        return executor_fail(exec, BHVD_ERR_SYSTEM, "no memory for a communicator of %d ranks", set->size);
    }
    bhvd_status status = exchange(exec, set, &mine, members, sizeof mine);
    if (!status)
        decide(members, set, group);
    if (group->is_on)
        status = join(exec, set, group, coll->staging->device);
    if (!status && group->two_level)
        status = join(exec, set->hierarchy->local, local, coll->staging->device);
    free(members);
    group->two_level &= local->device != NULL;
    if (group->two_level)
        group->local = local;
    else
        free(local);
    return status;
}

// ---------------------------------------------------------------------------------------------------------- errors

bhvd_status nccl_failed(struct executor *exec, const struct nccl_group *group, int result, const char *what)
{
    const struct nccl *nccl = group->device->nccl;
    const char *details = group->comm ? nccl->last_error(group->comm) : NULL;
    return executor_fail(exec, BHVD_ERR_SYSTEM, "rank %d: NCCL %d.%d.%d with CUDA %d.%d on GPU %d: %s: %s%s%s; NCCL_DEBUG=WARN "
                         "says more, BAGUA_HVD_NCCL=0 disables NCCL", exec->connections.rank, nccl->version / 10000,
                         nccl->version % 10000 / 100, nccl->version % 100, group->device->driver_version / 1000,
                         group->device->driver_version % 1000 / 10, group->device->index, what,
                         nccl->error_string(result), details && *details ? ": " : "", details ? details : "");
}

// 0: no error; NCCL_IN_PROGRESS; or an error.
static nccl_result state_of(const struct nccl_group *group)
{
    struct bhvd_device *device = group->device;
    nccl_result state = NCCL_SUCCESS;
    if (device->ops->enter(device))
        return NCCL_SUCCESS;            // errors of the driver are found through its events
    nccl_result result = device->nccl->async_error(group->comm, &state);
    device->ops->leave(device);
    return result ? result : state;
}

struct settling {
    const struct nccl_group *group;
    nccl_result state;
};

static int is_settled(struct executor *exec, void *arg)
{
    struct settling *settling = arg;
    (void)exec;
    if (!settling->group->comm)
        return -1;                      // aborted by a failure in the meantime
    settling->state = state_of(settling->group);
    return settling->state != NCCL_IN_PROGRESS;
}

bhvd_status nccl_settle(struct executor *exec, struct nccl_group *group)
{
    struct settling settling = {group, NCCL_SUCCESS};
    bhvd_status status = executor_wait_gpu(exec, is_settled, &settling);
    if (!status && settling.state)
        status = nccl_failed(exec, group, settling.state, "it failed");
    return status;
}

// Whether the GPU has exceeded the time limit for the work that was enqueued last.
static bool is_late(const struct executor *exec, struct nccl_group *group)
{
    if (!group->last_ns || clock_now_ns() < group->last_ns + executor_gpu_timeout_ns(exec))
        return false;
    const bool done = group->device->ops->event_query(group->device, group->done) != DEVICE_NOT_READY;
    group->last_ns = done ? 0 : group->last_ns;
    return !done;
}

void nccl_poll(struct executor *exec, struct nccl_group *group)
{
    for (; group; group = group->local) {
        const nccl_result state = group->comm && !exec->failure.status ? state_of(group) : NCCL_SUCCESS;
        if (state != NCCL_SUCCESS && state != NCCL_IN_PROGRESS)
            nccl_failed(exec, group, state, "it failed during a collective");
        else if (group->comm && !exec->failure.status && is_late(exec, group))
            executor_fail(exec, BHVD_ERR_TIMEOUT,
                          "rank %d: GPU %d has not finished a collective by NCCL for %.1f s, and NCCL reports no "
                          "error; the limit is %d times HOROVOD_GLOO_TIMEOUT_SECONDS", exec->connections.rank, group->device->index,
                          (double)executor_gpu_timeout_ns(exec) / 1e9, GPU_TIMEOUTS);
    }
}

static void *abort_group(void *arg)
{
    struct nccl_group *group = arg;
    if (group->device->ops->enter(group->device) == 0) {
        group->device->nccl->comm_abort(group->comm);
        group->device->ops->leave(group->device);
    }
    return NULL;
}

// One NCCL group for all aborts, from NCCL_GROUPS_ABORTS on.
static void abort_together(struct nccl_group *const *groups, int count)
{
    struct bhvd_device *device = groups[0]->device;
    if (device->ops->enter(device))
        return;
    device->nccl->group_start();
    for (int i = 0; i < count; i++)
        abort_group(groups[i]);
    device->nccl->group_end();
    device->ops->leave(device);
}

// For older versions: one thread per abort.
static void abort_by_threads(struct nccl_group *const *groups, int count)
{
    pthread_t threads[ABORTS_MAX];
    bool started[ABORTS_MAX];
    for (int i = 0; i < count; i++)
        started[i] = pthread_create(&threads[i], NULL, abort_group, groups[i]) == 0;
    for (int i = 0; i < count; i++) {
        if (started[i])
            pthread_join(threads[i], NULL);
        else
            abort_group(groups[i]);
    }
}

void nccl_abort(struct nccl_group *const *groups, int count)
{
    struct nccl_group *all[ABORTS_MAX];
    int found = 0;
    for (int i = 0; i < count; i++) {
        for (struct nccl_group *group = groups[i]; group && found < ABORTS_MAX; group = group->local) {
            if (group->comm)
                all[found++] = group;
        }
    }
    if (found)
        (all[0]->device->nccl->version >= NCCL_GROUPS_ABORTS ? abort_together : abort_by_threads)(all, found);
    for (int i = 0; i < found; i++)
        all[i]->comm = NULL;
}

// ------------------------------------------------------------------------------------------------------------- end

// Waits until the GPU's work is done, and NCCL's with its peers, which may have left already. True: all is done.
static bool finish(const struct nccl_group *group, int64_t deadline_ns)
{
    struct bhvd_device *device = group->device;
    while (device->ops->event_query(device, group->done) == DEVICE_NOT_READY) {
        if (state_of(group) || clock_now_ns() >= deadline_ns)
            return false;
        sched_yield();
    }
    if (device->ops->enter(device))
        return false;
    nccl_result state = device->nccl->comm_finalize(group->comm);
    device->ops->leave(device);
    while (state == NCCL_IN_PROGRESS && clock_now_ns() < deadline_ns) {
        state = state_of(group);
        sched_yield();
    }
    return state == NCCL_SUCCESS;
}

bool nccl_is_busy(const struct nccl_group *group)
{
    for (; group; group = group->local) {
        if (group->comm && group->device->ops->event_query(group->device, group->done) == DEVICE_NOT_READY)
            return true;
    }
    return false;
}

bool nccl_finish(struct nccl_group *group)
{
    bool all = true;
    for (; group; group = group->local) {
        group->finished = group->comm && finish(group, clock_deadline_ns(CLOSE_MS));
        all &= group->finished || !group->comm;
    }
    return all;
}

void nccl_close(struct nccl_group *group)
{
    if (!group)
        return;
    nccl_close(group->local);
    struct bhvd_device *device = group->device;
    if (group->comm && group->finished && device->ops->enter(device) == 0) {
        device->nccl->comm_destroy(group->comm);
        device->ops->leave(device);
    }
    if (device) {
        if (group->done)
            device->ops->event_destroy(device, group->done);
        bhvd_device_drop(device);
    }
    free(group);
}
