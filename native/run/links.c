// Polls the links that have work; transport/poller.h finds them.
#include <errno.h>
#include <string.h>

#include "run/plan.h"
#include "transport/socket.h"

static void fail_link(struct run *run, const struct link *link, bhvd_status status)
{
    if (status == BHVD_ERR_PEER_LOST && link->state == LINK_LEFT)
        run_fail_left(run, link->rank);
    else if (status == BHVD_ERR_PEER_LOST)
        run_blame(run, status, BHVD_CAUSE_ENDED, link->rank, "rank %d was lost: its process ended or became unreachable without "
                  "leaving the job", link->rank);
    else
        run_fail_protocol(run, link->rank);
}

// Call after every change that may affect the events to wait for.
static void update(struct run *run, struct link *link)
{
    if (!run->failure.status && poller_update(&run->connections.poller, link))
        run_fail(run, BHVD_ERR_SYSTEM, "the connection to rank %d cannot be polled: %s%s", link->rank, strerror(errno),
                 socket_remedy(errno));
}

// A link that was needed for a message could not be opened.
static void fail_opening(struct run *run, const struct link *link, const struct bhvd_error *error)
{
    if (link->state == LINK_LEFT)
        run_fail_left(run, link->rank);
    else if (error->status == BHVD_ERR_PEER_LOST || error->status == BHVD_ERR_TIMEOUT)
        run_blame(run, BHVD_ERR_PEER_LOST, BHVD_CAUSE_SILENT, link->rank,
                  "%.700s. Rank %d has ended, or its host or the network between broke down: see whether a firewall closes the ports "
                  "between the two hosts", error->message, link->rank);
    else
        run_fail_with(run, error);
}

static bool is_needed(const struct link *link) { return traffic_is_pending(&link->sends) || traffic_is_pending(&link->receives); }

static void take_arrivals(struct run *run)
{
    struct bhvd_error error;
    for (struct link *link; !run->failure.status && connections_have_arrivals(&run->connections);) {
        link = connections_take(&run->connections, &error);
        if (error.status && !link)
            run_fail_with(run, &error);
        if (!link)
            continue;
        if (error.status && is_needed(link))
            fail_opening(run, link, &error);
        update(run, link);
        link_mark_ready(link);
    }
}

static bool advance(struct run *run, struct link *link, bool by_socket)
{
    bool moved = false;
    uint64_t payload_before = link->payload_sent + link->payload_received;
    bhvd_status status = link_advance(link, run->callbacks->on_frame, run->owner, &moved);
    uint64_t payload = link->payload_sent + link->payload_received - payload_before;
    run->messages_moved += payload;
    if (status) {
        fail_link(run, link, status);
    } else if (link->state == LINK_LEFT && !moved &&
               (traffic_is_pending(&link->sends) || (traffic_is_pending(&link->receives) && !by_socket))) {
        run_fail_left(run, link->rank);
    }
    if (payload && by_socket)
        atomic_fetch_add_explicit(&run->connections.doorbell.word->activity, 1, memory_order_relaxed);
    return moved;
}

// For a link over memory or MPI: is there work?
static bool has_something(struct link *link, bool look_at_sockets)
{
    if (link->control_out.size || traffic_is_pending(&link->sends) || link_ready(link) || link->state != LINK_OPEN)
        return true;
    if (look_at_sockets && !link->control.ops->readable)
        return true;
    link_needs_poll(link);              // polls MPI as a side effect
    return false;
}

static bool advance_polled(struct run *run, bool look_at_sockets)
{
    const struct poller *poller = &run->connections.poller;
    bool progress = false;
    for (int i = 0; i < poller->polled_count && !run->failure.status; i++) {
        struct link *link = poller->polled[i];
        const enum link_state state = link->state;
        if (!has_something(link, look_at_sockets))
            continue;
        progress |= advance(run, link, !link->control.ops->readable);
        if (link->control.fd >= 0 || link->state != state)
            update(run, link);
    }
    return progress;
}

// Advances the links queued now; links queued meanwhile are for the next call.
static bool advance_ready(struct run *run)
{
    struct link_queue *ready_links = &run->connections.poller.ready_links, now = *ready_links;
    bool progress = false;
    if (!now.head)
        return false;
    fifo_take_all(ready_links);
    for (struct link *link; (link = link_queue_pop(&now)) && !run->failure.status;) {
        if (is_needed(link) && connections_open(&run->connections, link))
            run_fail(run, BHVD_ERR_SYSTEM, "no memory to connect to rank %d", link->rank);
        const bool moved = advance(run, link, true);
        progress |= moved;
        update(run, link);
        if (moved && link->state != LINK_OPEN)
            link_mark_ready(link);      // check once more for expected messages
    }
    return progress;
}

static void look(struct run *run)
{
    struct link *gone[POLLER_EVENTS];
    const int count = poller_look(&run->connections.poller, gone);
    for (int i = 0; i < count && !run->failure.status; i++) {
        bool progress = false;
        if (gone[i]->state == LINK_OPEN)
            link_hang_up(gone[i], run->callbacks->on_frame, run->owner, &progress);
        if (gone[i]->state == LINK_LOST)
            fail_link(run, gone[i], BHVD_ERR_PEER_LOST);
        update(run, gone[i]);
    }
}

bool run_advance_links(struct run *run, bool look_at_sockets)
{
    if (connections_have_arrivals(&run->connections))
        take_arrivals(run);
    if (look_at_sockets && run->connections.poller.socket_count)
        look(run);
    bool progress = advance_polled(run, look_at_sockets);
    progress |= advance_ready(run);
    progress |= executor_advance(run);
    return progress;
}

bool run_links_need_poll(const struct run *run)
{
    for (int i = 0; i < run->connections.poller.polled_count && !run->failure.status; i++) {
        if (link_needs_poll(run->connections.poller.polled[i]))
            return true;
    }
    return false;
}

bool run_links_are_ready(struct run *run)
{
    for (int i = 0; i < run->connections.poller.polled_count; i++) {
        if (link_ready(run->connections.poller.polled[i]))
            return true;
    }
    return run->connections.poller.ready_links.head || connections_have_arrivals(&run->connections) || executor_can_advance(run);
}

bool run_links_wait_for_room(const struct run *run)
{
    for (int i = 0; i < run->connections.poller.polled_count; i++) {
        if (run->connections.poller.polled[i]->control_out.size)
            return true;
    }
    return false;
}

void run_look_at_liveness(struct run *run)
{
    if (run->connections.poller.liveness_count && !run->failure.status)
        look(run);
}
