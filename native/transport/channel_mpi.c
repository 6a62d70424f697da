// Channels over MPI: messages between ranks of different hosts, in jobs that mpirun started. Control and liveness
// stay on the TCP socket of the link.
//
// The byte pipe is split into MPI messages of at most PIPE_SLOT_BYTES in slots that this file owns: after a peer's death MPI may
// access the memory of a request at any time, so it must not be the user's. MPI keeps the order of
// messages between two ranks with one tag.
#include "transport/connect.h"

#include <sched.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/size.h"
#include "base/status.h"

enum {
    TAG = 1,
    PIPE_SLOTS = 4,                     // in each direction
    PIPE_SLOT_BYTES = 256 * 1024,       // more than a network needs to reach its bandwidth
    CANCEL_CHECKS = 1000                // until a cancelled receive must be complete, which needs only local work
};

struct slot {
    unsigned char *data;
    union mpi_handle request;
    bool pending;
    int filled;                         // receives: bytes that arrived, once complete
};

// One direction: slots are used, and complete, in ring order.
struct slots {
    struct slot slot[PIPE_SLOTS];
    unsigned char *memory;              // NULL until first used: most pairs of ranks never communicate
    unsigned oldest, next;              // posted and not yet freed: oldest <= i < next, slot[i % PIPE_SLOTS]
};

struct mpi_pipe {
    union mpi_handle communicator;
    int peer;
    struct slots sends, receives;
    int consumed;                       // bytes taken from the oldest receive
    bool broken;
};

static struct slot *oldest(struct slots *slots) { return &slots->slot[slots->oldest % PIPE_SLOTS]; }
static bool is_empty(const struct slots *slots) { return slots->next == slots->oldest; }
static bool is_full(const struct slots *slots) { return slots->next - slots->oldest == PIPE_SLOTS; }

static bool allocate(struct slots *slots)
{
    if (slots->memory)
        return true;
    slots->memory = aligned_alloc(4096, (size_t)PIPE_SLOTS * PIPE_SLOT_BYTES);
    for (int i = 0; i < PIPE_SLOTS && slots->memory; i++)
        slots->slot[i].data = slots->memory + (size_t)i * PIPE_SLOT_BYTES;
    return slots->memory != NULL;
}

static bhvd_status broken(struct mpi_pipe *pipe)
{
    pipe->broken = true;
    return BHVD_ERR_PEER_LOST;
}

// As MPI_Test. received: set to the number of bytes of a completed receive; may be NULL.
static int test(union mpi_handle *request, int *complete, int *received)
{
    struct mpi_status status = {{0}};
    const int code = mpi.call.MPI_Test(request, complete, &status);
    return code != MPI_DONE || !*complete || !received ? code : mpi.call.MPI_Get_count(&status, mpi.byte, received);
}

// Is the oldest request complete? An error marks the pipe as broken.
static bool check(struct mpi_pipe *pipe, struct slots *slots, bool receives)
{
    struct slot *slot = oldest(slots);
    int complete = 0;
    if (pipe->broken || is_empty(slots))
        return false;
    if (!slot->pending)
        return true;
    if (test(&slot->request, &complete, receives ? &slot->filled : NULL) != MPI_DONE)
        pipe->broken = true;
    else
        slot->pending = !complete;
    return !pipe->broken && complete;
}

static void free_sent(struct mpi_pipe *pipe)
{
    while (check(pipe, &pipe->sends, false))
        pipe->sends.oldest++;
}

static bhvd_status channel_mpi_send(struct channel *channel, const struct iovec *parts, int count, size_t *moved)
{
    struct mpi_pipe *pipe = channel->pipe;
    *moved = 0;
    free_sent(pipe);
    if (pipe->broken)
        return BHVD_ERR_PEER_LOST;
    if (!allocate(&pipe->sends))
        return BHVD_ERR_SYSTEM;
    size_t part = 0;                    // bytes of parts[0] that are already in a slot
    while (!is_full(&pipe->sends)) {
        struct slot *slot = &pipe->sends.slot[pipe->sends.next % PIPE_SLOTS];
        size_t filled = 0;
        while (count > 0 && filled < PIPE_SLOT_BYTES) {
            const size_t n = size_min(parts->iov_len - part, PIPE_SLOT_BYTES - filled);
            memcpy(slot->data + filled, (char *)parts->iov_base + part, n);
            filled += n;
            part += n;
            if (part == parts->iov_len) {
                parts++;
                count--;
                part = 0;
            }
        }
        if (filled == 0)
            break;
        if (mpi.call.MPI_Isend(slot->data, (int)filled, mpi.byte, pipe->peer, TAG, pipe->communicator, &slot->request) != MPI_DONE)
            return broken(pipe);
        slot->pending = true;
        pipe->sends.next++;
        *moved += filled;
    }
    return BHVD_OK;
}

static bhvd_status post_receives(struct mpi_pipe *pipe)
{
    if (!allocate(&pipe->receives))
        return BHVD_ERR_SYSTEM;
    while (!is_full(&pipe->receives)) {
        struct slot *slot = &pipe->receives.slot[pipe->receives.next % PIPE_SLOTS];
        if (mpi.call.MPI_Irecv(slot->data, PIPE_SLOT_BYTES, mpi.byte, pipe->peer, TAG, pipe->communicator, &slot->request) !=
            MPI_DONE)
            return broken(pipe);
        slot->pending = true;
        pipe->receives.next++;
    }
    return BHVD_OK;
}

static bhvd_status channel_mpi_recv(struct channel *channel, void *dst, size_t size, size_t *moved)
{
    struct mpi_pipe *pipe = channel->pipe;
    *moved = 0;
    bhvd_status status = pipe->broken ? BHVD_ERR_PEER_LOST : post_receives(pipe);
    while (!status && *moved < size && check(pipe, &pipe->receives, true)) {
        struct slot *slot = oldest(&pipe->receives);
        const size_t n = size_min((size_t)(slot->filled - pipe->consumed), size - *moved);
        memcpy((char *)dst + *moved, slot->data + pipe->consumed, n);
        *moved += n;
        pipe->consumed += (int)n;
        if (pipe->consumed == slot->filled) {
            pipe->consumed = 0;
            pipe->receives.oldest++;
            status = post_receives(pipe);
        }
    }
    return pipe->broken ? BHVD_ERR_PEER_LOST : status;
}

// A broken pipe is readable: the read returns the error.
static bool channel_mpi_readable(const struct channel *channel)
{
    struct mpi_pipe *pipe = channel->pipe;
    return is_empty(&pipe->receives) || check(pipe, &pipe->receives, true) || pipe->broken;
}

static bool channel_mpi_writable(const struct channel *channel)
{
    struct mpi_pipe *pipe = channel->pipe;
    free_sent(pipe);
    return !is_full(&pipe->sends) || pipe->broken;
}

static bool channel_mpi_unfinished(const struct channel *channel)
{
    struct mpi_pipe *pipe = channel->pipe;
    free_sent(pipe);
    return !is_empty(&pipe->sends) && !pipe->broken;
}

const struct channel_ops channel_mpi_ops = {
    .send = channel_mpi_send,
    .recv = channel_mpi_recv,
    .readable = channel_mpi_readable,
    .writable = channel_mpi_writable,
    .unfinished = channel_mpi_unfinished,
};

// ------------------------------------------------------------------------------------------ setup and teardown

// Waits for a request that may never complete, since it needs all ranks.
static bhvd_status wait_for_all(union mpi_handle *request, int64_t deadline_ns, struct bhvd_error *error)
{
    for (int complete = 0;;) {
        int code = test(request, &complete, NULL);
        if (code != MPI_DONE)
            return error_set(error, BHVD_ERR_SYSTEM, "MPI_Comm_idup failed with code %d", code);
        if (complete)
            return BHVD_OK;
        if (clock_now_ns() >= deadline_ns)
            return error_set(error, BHVD_ERR_TIMEOUT, "not all ranks called MPI_Comm_idup in time; did one fail in "
                             "init()?");
        sched_yield();
    }
}

bhvd_status mpi_connect(struct connections *c, int64_t deadline_ns, struct bhvd_error *error)
{
    // MPI writes there when the last rank calls, perhaps after this one gave up: then the memory must stay MPI's.
    struct {
        union mpi_handle communicator, request;
    } *duplicate = calloc(1, sizeof *duplicate);
    if (!duplicate)
        return error_set(error, BHVD_ERR_SYSTEM, "no memory for a communicator");
    if (mpi.call.MPI_Comm_idup(mpi.world, &duplicate->communicator, &duplicate->request) != MPI_DONE) {
        free(duplicate);
        return error_set(error, BHVD_ERR_SYSTEM, "MPI_Comm_idup failed");
    }
    bhvd_status status = wait_for_all(&duplicate->request, deadline_ns, error);
    if (status)
        return status;          // cppcheck-suppress memleak
    c->communicator = duplicate->communicator;
    c->has_communicator = true;
    free(duplicate);
    if (mpi.call.MPI_Comm_set_errhandler(c->communicator, mpi.errors_return) != MPI_DONE)
        return error_set(error, BHVD_ERR_SYSTEM, "MPI_Comm_set_errhandler failed");
    for (int rank = 0; rank < c->size; rank++) {
        struct link *link = &c->links[rank];
        if (rank == c->rank || link->local_index >= 0)
            continue;
        struct mpi_pipe *pipe = calloc(1, sizeof *pipe);
        if (!pipe)
            return error_set(error, BHVD_ERR_SYSTEM, "no memory for %d ranks", c->size);
        pipe->communicator = c->communicator;
        pipe->peer = rank;
        link->data_channels[0].channel = (struct channel){.ops = &channel_mpi_ops, .fd = -1, .pipe = pipe};
    }
    return BHVD_OK;
}

// True when MPI holds none of the slots any more. Receives are cancelled; a send to a lost rank cannot be cancelled.
static bool release(struct mpi_pipe *pipe)
{
    for (; !is_empty(&pipe->receives); pipe->receives.oldest++) {
        struct slot *slot = oldest(&pipe->receives);
        int complete = !slot->pending;
        if (!complete && mpi.call.MPI_Cancel(&slot->request) != MPI_DONE)
            return false;
        for (int i = 0; i < CANCEL_CHECKS && !complete; i++) {
            if (test(&slot->request, &complete, NULL) != MPI_DONE)
                return false;
        }
        if (!complete)
            return false;
    }
    free_sent(pipe);
    return is_empty(&pipe->sends) && !pipe->broken;
}

void mpi_disconnect(struct connections *c)
{
    bool running = mpi_is_running(), released = running && c->has_communicator;
    for (int rank = 0; rank < c->size && c->links; rank++) {
        struct link *link = &c->links[rank];
        released = released && link->state != LINK_LOST;
        struct mpi_pipe *pipe = link->data_channels[0].channel.pipe;
        if (!pipe)
            continue;
        link->data_channels[0].channel.pipe = NULL;
        // Memory that MPI may still access is not freed. After MPI is finalized there is none.
        if (!running || release(pipe)) {
            free(pipe->sends.memory);
            free(pipe->receives.memory);
        } else {
            released = false;
        }
        free(pipe);
    }
    if (released)
        mpi.call.MPI_Comm_free(&c->communicator);
    c->has_communicator = false;
}
