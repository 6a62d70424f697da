// Polls the links that have work; transport/poller.h finds them.
#include <errno.h>
#include <string.h>

#include "base/status.h"
#include "executor/task.h"
#include "transport/socket.h"

static void fail_link(struct executor *exec, const struct link *link, bhvd_status status)
{
    if (status == BHVD_ERR_PEER_LOST && link->state == LINK_DEPARTED)
        executor_fail_departed(exec, link->rank);
    else if (status == BHVD_ERR_PEER_LOST)
        executor_blame(exec, status, BHVD_CAUSE_ENDED, link->rank,
                       "rank %d was lost: its process ended or became unreachable without leaving the job", link->rank);
    else if (status == BHVD_ERR_PROTOCOL)
        executor_fail_protocol(exec, link->rank);
    else                // or a frame has failed the executor already
        executor_fail(exec, BHVD_ERR_SYSTEM, "no memory for a message from rank %d", link->rank);
}

// Call after every change that may affect the events to wait for.
static void update(struct executor *exec, struct link *link)
{
    if (!exec->failure.status && poller_update(&exec->connections.poller, link))
        executor_fail(exec, BHVD_ERR_SYSTEM, "the connection to rank %d cannot be polled: %s%s", link->rank, strerror(errno),
                      socket_remedy(errno));
}

// A link that was needed for a message could not be opened.
static void fail_opening(struct executor *exec, const struct link *link, const struct bhvd_error *error)
{
    if (link->state == LINK_DEPARTED)
        executor_fail_departed(exec, link->rank);
    else if (error->status == BHVD_ERR_PEER_LOST || error->status == BHVD_ERR_TIMEOUT)
        executor_blame(exec, BHVD_ERR_PEER_LOST, BHVD_CAUSE_SILENT, link->rank,
                       "%.700s. Rank %d may have ended, or its host or the network may be down: check whether a firewall "
                       "closes the ports between the two hosts", error->message, link->rank);
    else
        executor_fail_with(exec, error);
}

static bool is_needed(const struct link *link) { return traffic_is_pending(&link->sends) || traffic_is_pending(&link->receives); }

static void accept_connections(struct executor *exec)
{
    struct bhvd_error error;
    for (struct link *link; !exec->failure.status && connections_have_arrivals(&exec->connections);) {
        link = connections_take(&exec->connections, &error);
        if (error.status && !link)
            executor_fail_with(exec, &error);
        if (!link)
            continue;
        if (error.status && is_needed(link))
            fail_opening(exec, link, &error);
        update(exec, link);
        link_mark_active(link);
    }
}

static bool advance(struct executor *exec, struct link *link, bool by_socket)
{
    bool moved = false;
    uint64_t payload_before = link->payload_sent + link->payload_received;
    bhvd_status status = link_advance(link, exec->callbacks->on_frame, exec->ctx, &moved);
    uint64_t payload = link->payload_sent + link->payload_received - payload_before;
    exec->moved += payload;
    if (status) {
        fail_link(exec, link, status);
    } else if (link->state == LINK_DEPARTED && !moved &&
               (traffic_is_pending(&link->sends) || (traffic_is_pending(&link->receives) && !by_socket))) {
        executor_fail_departed(exec, link->rank);
    }
    if (payload && by_socket)
        atomic_fetch_add_explicit(&exec->connections.doorbell.word->activity, 1, memory_order_relaxed);
    return moved;
}

// For a link over memory or MPI: is there work?
static bool has_something(struct link *link, bool poll_sockets)
{
    if (link->control_out.size || traffic_is_pending(&link->sends) || link_ready(link) || link->state != LINK_OPEN)
        return true;
    if (poll_sockets && !link->control.ops->readable)
        return true;
    link_needs_poll(link);              // polls MPI as a side effect
    return false;
}

static bool advance_polled(struct executor *exec, bool poll_sockets)
{
    const struct poller *poller = &exec->connections.poller;
    bool progress = false;
    for (int i = 0; i < poller->polled_count && !exec->failure.status; i++) {
        struct link *link = poller->polled[i];
        const enum link_state state = link->state;
        if (!has_something(link, poll_sockets))
            continue;
        progress |= advance(exec, link, !link->control.ops->readable);
        if (link->control.fd >= 0 || link->state != state)
            update(exec, link);
    }
    return progress;
}

// Advances the links queued now; links queued meanwhile are for the next call.
static bool advance_ready(struct executor *exec)
{
    struct link_queue *active_links = &exec->connections.poller.active_links, now = *active_links;
    bool progress = false;
    if (!now.head)
        return false;
    fifo_take_all(active_links);
    for (struct link *link; (link = link_queue_pop(&now)) && !exec->failure.status;) {
        if (is_needed(link) && connections_open(&exec->connections, link)) {
            executor_fail(exec, BHVD_ERR_SYSTEM, "no memory to connect to rank %d", link->rank);
            break;
        }
        const bool moved = advance(exec, link, true);
        progress |= moved;
        update(exec, link);
        if (moved && link->state != LINK_OPEN)
            link_mark_active(link);      // check once more for expected messages
    }
    return progress;
}

static void check_sockets(struct executor *exec)
{
    struct link *gone[POLLER_EVENTS];
    const int count = poller_check(&exec->connections.poller, gone);
    for (int i = 0; i < count && !exec->failure.status; i++) {
        bool progress = false;
        if (gone[i]->state == LINK_OPEN)
            link_hang_up(gone[i], exec->callbacks->on_frame, exec->ctx, &progress);
        if (gone[i]->state == LINK_LOST)
            fail_link(exec, gone[i], BHVD_ERR_PEER_LOST);
        update(exec, gone[i]);
    }
}

bool executor_poll(struct executor *exec, bool poll_sockets)
{
    if (connections_have_arrivals(&exec->connections))
        accept_connections(exec);
    if (poll_sockets && exec->connections.poller.socket_count)
        check_sockets(exec);
    bool progress = advance_polled(exec, poll_sockets);
    progress |= advance_ready(exec);
    progress |= tasks_advance(exec);
    return progress;
}

bool executor_needs_poll(const struct executor *exec)
{
    for (int i = 0; i < exec->connections.poller.polled_count && !exec->failure.status; i++) {
        if (link_needs_poll(exec->connections.poller.polled[i]))
            return true;
    }
    return false;
}

bool executor_has_work(struct executor *exec)
{
    for (int i = 0; i < exec->connections.poller.polled_count; i++) {
        if (link_ready(exec->connections.poller.polled[i]))
            return true;
    }
    return exec->connections.poller.active_links.head || connections_have_arrivals(&exec->connections) || tasks_can_advance(exec);
}

bool executor_waits_for_room(const struct executor *exec)
{
    for (int i = 0; i < exec->connections.poller.polled_count; i++) {
        if (exec->connections.poller.polled[i]->control_out.size)
            return true;
    }
    return false;
}

void executor_check_liveness(struct executor *exec)
{
    if (exec->connections.poller.liveness_count && !exec->failure.status)
        check_sockets(exec);
}
