// Decides which process sets use NCCL, and manages their communicators.
#include "gpu/nccl.h"

#include <sched.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/dtype.h"
#include "base/status.h"
#include "collective/collectives.h"
#include "device/nccl_library.h"
#include "executor/group.h"
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
    uint8_t scales, encodes, hierarchical, zero;   // hierarchical: enum nccl_hierarchical
};

struct nccl_facts nccl_facts_of(const struct nccl_comm *comm, const struct group *set, bhvd_kind kind, bool hierarchical)
{
    struct nccl_facts facts = {.is_hierarchical = primitive_is_hierarchical(set, kind, hierarchical), .device = -1};
    if (!comm || !(comm->is_on || comm->by_host))
        return facts;
    facts.is_on = comm->is_on;
    facts.by_host = comm->by_host;
    facts.scales = comm->scales;
    facts.encodes = comm->encodes;
    facts.device = (comm->is_on ? comm : comm->local)->device->index;
    return facts;
}

// NCCL has no 16-bit integers and no bool; integers are scaled on the CPU only. If hierarchical, the CPU does the final scaling.
static bool reduces(const struct collective *coll, bool scales, bool hierarchical)
{
    const bool averaged = coll->args.op == BHVD_OP_AVERAGE || coll->args.postscale_factor != 1.0;
    const bool scaled = coll->args.prescale_factor != 1.0 || (averaged && !hierarchical);
    for (size_t t = 0; t < coll->args.tensor_count; t++) {
        const bhvd_dtype dtype = coll->tensors[t].dtype;
        if (dtype == BHVD_UINT16 || dtype == BHVD_INT16 || dtype == BHVD_BOOL)
            return false;
        if (scaled && !(scales && dtype_is_floating(dtype)))
            return false;
    }
    return coll->args.op != BHVD_OP_ADASUM;
}

enum nccl_path nccl_path_of(const struct nccl_facts *facts, const struct collective *coll)
{
    const bool allowed = coll->args.kind == BHVD_ALLREDUCE || (coll->args.kind == BHVD_BROADCAST && !facts->is_on);
    const bool hierarchical = facts->by_host && allowed;
    const enum nccl_path path = hierarchical ? PATH_HIERARCHICAL : facts->is_on ? PATH_NCCL : PATH_HOST;
    switch (coll->args.kind) {
    case BHVD_ALLREDUCE:
    case BHVD_REDUCESCATTER:
        return reduces(coll, facts->scales, hierarchical) ? path : PATH_HOST;
    case BHVD_BROADCAST:
    case BHVD_ALLGATHER:
    case BHVD_ALLTOALL:
        return path;
    case BHVD_C_LP_S:
    case BHVD_D_LP_S:
        return facts->is_on && facts->encodes && !facts->is_hierarchical &&
               device_encoder_supports(coll->args.codec, coll->tensors[0].dtype)
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

static struct member member_of(const struct collective *coll, int hierarchical)
{
    struct member member = {.hierarchical = (uint8_t)hierarchical};
    const struct bhvd_device *device = coll->staging ? coll->staging->device : NULL;
    if (!device || !device->nccl)
        return member;
    memcpy(member.uuid, device->uuid, sizeof member.uuid);
    member.version = device->nccl->version;
    member.scales = true;
    for (int type = 0; type < DEVICE_TYPES; type++)
        member.scales &= device_kernel(device, BHVD_DEVICE_SCALE, type) != NULL;
    member.encodes = member.scales;
    for (int i = 0; i < (BHVD_DEVICE_KERNEL_COUNT - BHVD_DEVICE_FEED_RESIDUAL) * DEVICE_TYPES; i++)
        member.encodes &= device_kernel(device, BHVD_DEVICE_FEED_RESIDUAL + i / DEVICE_TYPES, i % DEVICE_TYPES) != NULL;
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
static void decide(const struct member *members, const struct group *set, struct nccl_comm *comm)
{
    int hierarchical = HIERARCHICAL_WHERE_NEEDED;
    comm->scales = comm->encodes = true;
    for (int i = 0; i < set->size; i++) {
        hierarchical = members[i].hierarchical > hierarchical ? members[i].hierarchical : hierarchical;
        comm->scales &= members[i].scales != 0;
        comm->encodes &= members[i].encodes != 0;
    }
    comm->is_on = can(members, NULL, set->size) && !(set->hierarchy && hierarchical == HIERARCHICAL_ONLY);
    comm->by_host = (!comm->is_on || hierarchical != HIERARCHICAL_WHERE_NEEDED) && hosts_can(members, set->hierarchy);
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
    return plan.group ? plan_execute(exec, &plan) : status;
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
static bhvd_status join(struct executor *exec, struct group *set, struct nccl_comm *comm, struct bhvd_device *device)
{
    device_hold(device);
    comm->device = device;
    const struct nccl *nccl = device->nccl;
    int failed = device->ops->event_create(device, &comm->done);
    if (failed)
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
        return nccl_failed(exec, comm, first.result, "rank 0 of the process set cannot create the communicator's id");
    failed = device->ops->enter(device);
    if (failed)
        return executor_fail(exec, BHVD_ERR_SYSTEM, "GPU %d cannot be used by NCCL", device->index);
    struct nccl_config config = NCCL_CONFIG_UNBLOCKED;
    nccl_result result = nccl->comm_init(&comm->handle, set->size, first.id, set->rank, &config);
    device->ops->leave(device);
    if (result != NCCL_SUCCESS && result != NCCL_IN_PROGRESS)
        return nccl_failed(exec, comm, result, "cannot create its communicator");
    return nccl_settle(exec, comm);
}

bhvd_status nccl_agree(struct executor *exec, struct group *set, const struct collective *coll, int hierarchical,
                       struct nccl_comm **out)
{
    const struct member mine = member_of(coll, hierarchical);
    struct nccl_comm *local = calloc(1, sizeof *local);
    struct nccl_comm *comm = *out = calloc(1, sizeof *comm);
    struct member *members = malloc((size_t)set->size * sizeof *members);
    if (!comm || !local || !members) {
        free(local);
        free(comm);
        free(members);
        *out = NULL;
        return executor_fail(exec, BHVD_ERR_SYSTEM, "no memory for a communicator of %d ranks", set->size);
    }
    bhvd_status status = exchange(exec, set, &mine, members, sizeof mine);
    if (!status)
        decide(members, set, comm);
    if (comm->is_on)
        status = join(exec, set, comm, coll->staging->device);
    if (!status && comm->by_host)
        status = join(exec, set->hierarchy->local, local, coll->staging->device);
    free(members);
    comm->by_host &= local->device != NULL;
    if (comm->by_host)
        comm->local = local;
    else
        free(local);
    return status;
}

// ---------------------------------------------------------------------------------------------------------- errors

bhvd_status nccl_failed(struct executor *exec, const struct nccl_comm *comm, int result, const char *what)
{
    const struct nccl *nccl = comm->device->nccl;
    const char *details = comm->handle ? nccl->last_error(comm->handle) : NULL;
    return executor_fail(exec, BHVD_ERR_SYSTEM, "rank %d: NCCL %d.%d.%d with CUDA %d.%d on GPU %d: %s: %s%s%s; NCCL_DEBUG=WARN "
                         "says more, BAGUA_HVD_NCCL=0 disables NCCL", exec->connections.rank, nccl->version / 10000,
                         nccl->version % 10000 / 100, nccl->version % 100, comm->device->driver_version / 1000,
                         comm->device->driver_version % 1000 / 10, comm->device->index, what,
                         nccl->error_string(result), details && *details ? ": " : "", details ? details : "");
}

// 0: no error; NCCL_IN_PROGRESS; or an error.
static nccl_result state_of(const struct nccl_comm *comm)
{
    struct bhvd_device *device = comm->device;
    nccl_result state = NCCL_SUCCESS;
    if (device->ops->enter(device))
        return NCCL_SUCCESS;            // errors of the driver are found through its events
    nccl_result result = device->nccl->async_error(comm->handle, &state);
    device->ops->leave(device);
    return result ? result : state;
}

struct settling {
    const struct nccl_comm *comm;
    nccl_result state;
};

static int is_settled(struct executor *exec, void *arg)
{
    struct settling *settling = arg;
    (void)exec;
    if (!settling->comm->handle)
        return -1;                      // aborted by a failure in the meantime
    settling->state = state_of(settling->comm);
    return settling->state != NCCL_IN_PROGRESS;
}

bhvd_status nccl_settle(struct executor *exec, struct nccl_comm *comm)
{
    struct settling settling = {comm, NCCL_SUCCESS};
    bhvd_status status = executor_wait_gpu(exec, is_settled, &settling);
    if (!status && settling.state)
        status = nccl_failed(exec, comm, settling.state, "it failed");
    return status;
}

// Whether the GPU has exceeded the time limit for the work that was enqueued last.
static bool is_late(const struct executor *exec, struct nccl_comm *comm)
{
    if (!comm->last_ns || clock_now_ns() < comm->last_ns + executor_gpu_timeout_ns(exec))
        return false;
    const bool done = comm->device->ops->event_query(comm->device, comm->done) != DEVICE_NOT_READY;
    comm->last_ns = done ? 0 : comm->last_ns;
    return !done;
}

void nccl_poll(struct executor *exec, struct nccl_comm *comm)
{
    for (; comm; comm = comm->local) {
        const nccl_result state = comm->handle && !exec->failure.status ? state_of(comm) : NCCL_SUCCESS;
        if (state != NCCL_SUCCESS && state != NCCL_IN_PROGRESS)
            nccl_failed(exec, comm, state, "it failed during a collective");
        else if (comm->handle && !exec->failure.status && is_late(exec, comm))
            executor_fail(exec, BHVD_ERR_TIMEOUT,
                          "rank %d: GPU %d has not finished a collective by NCCL for %.1f s, and NCCL reports no "
                          "error; the limit is %d times HOROVOD_GLOO_TIMEOUT_SECONDS", exec->connections.rank, comm->device->index,
                          (double)executor_gpu_timeout_ns(exec) / 1e9, GPU_TIMEOUTS);
    }
}

static void *abort_one(void *arg)
{
    struct nccl_comm *comm = arg;
    if (comm->device->ops->enter(comm->device) == 0) {
        comm->device->nccl->comm_abort(comm->handle);
        comm->device->ops->leave(comm->device);
    }
    return NULL;
}

// One NCCL group for all aborts, from NCCL_GROUPS_ABORTS on.
static void abort_together(struct nccl_comm *const *comms, int count)
{
    struct bhvd_device *device = comms[0]->device;
    if (device->ops->enter(device))
        return;
    device->nccl->group_start();
    for (int i = 0; i < count; i++)
        abort_one(comms[i]);
    device->nccl->group_end();
    device->ops->leave(device);
}

// For older versions: one thread per abort.
static void abort_by_threads(struct nccl_comm *const *comms, int count)
{
    pthread_t threads[ABORTS_MAX];
    bool started[ABORTS_MAX];
    for (int i = 0; i < count; i++)
        started[i] = pthread_create(&threads[i], NULL, abort_one, comms[i]) == 0;
    for (int i = 0; i < count; i++) {
        if (started[i])
            pthread_join(threads[i], NULL);
        else
            abort_one(comms[i]);
    }
}

void nccl_abort(struct nccl_comm *const *comms, int count)
{
    struct nccl_comm *all[ABORTS_MAX];
    int found = 0;
    for (int i = 0; i < count; i++) {
        for (struct nccl_comm *comm = comms[i]; comm && found < ABORTS_MAX; comm = comm->local) {
            if (comm->handle)
                all[found++] = comm;
        }
    }
    if (found)
        (all[0]->device->nccl->version >= NCCL_GROUPS_ABORTS ? abort_together : abort_by_threads)(all, found);
    for (int i = 0; i < found; i++)
        all[i]->handle = NULL;
}

// ------------------------------------------------------------------------------------------------------------- end

// Waits until the GPU's work is done, and NCCL's with its peers, which may have left already. True: all is done.
static bool finish(const struct nccl_comm *comm, int64_t deadline_ns)
{
    struct bhvd_device *device = comm->device;
    while (device->ops->event_query(device, comm->done) == DEVICE_NOT_READY) {
        if (state_of(comm) || clock_now_ns() >= deadline_ns)
            return false;
        sched_yield();
    }
    if (device->ops->enter(device))
        return false;
    nccl_result state = device->nccl->comm_finalize(comm->handle);
    device->ops->leave(device);
    while (state == NCCL_IN_PROGRESS && clock_now_ns() < deadline_ns) {
        state = state_of(comm);
        sched_yield();
    }
    return state == NCCL_SUCCESS;
}

bool nccl_is_busy(const struct nccl_comm *comm)
{
    for (; comm; comm = comm->local) {
        if (comm->handle && comm->device->ops->event_query(comm->device, comm->done) == DEVICE_NOT_READY)
            return true;
    }
    return false;
}

bool nccl_finish(struct nccl_comm *comm)
{
    bool all = true;
    for (; comm; comm = comm->local) {
        comm->finished = comm->handle && finish(comm, clock_deadline_ns(CLOSE_MS));
        all &= comm->finished || !comm->handle;
    }
    return all;
}

void nccl_close(struct nccl_comm *comm)
{
    if (!comm)
        return;
    nccl_close(comm->local);
    struct bhvd_device *device = comm->device;
    if (comm->handle && comm->finished && device->ops->enter(device) == 0) {
        device->nccl->comm_destroy(comm->handle);
        device->ops->leave(device);
    }
    if (device) {
        if (comm->done)
            device->ops->event_destroy(device, comm->done);
        bhvd_device_drop(device);
    }
    free(comm);
}
