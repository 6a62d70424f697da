// Looking at the links to all other ranks.
#include <poll.h>

#include "run/executor.h"

static void fail_link(struct run *run, const struct link *link, bhvd_status status)
{
    if (status == BHVD_ERR_PEER_LOST)
        run_blame(run, status, BHVD_CAUSE_ENDED, link->rank, "rank %d was lost: its process ended or became unreachable without "
                  "leaving the job", link->rank);
    else
        run_fail_protocol(run, link->rank);
}

static bool advance(struct run *run, struct link *link, bool look_at_sockets)
{
    bool moved = false;
    bool has_output = link->control_out.size || traffic_is_pending(&link->sends);
    bool by_socket = !link->control.ops->readable;
    if (!has_output && !(by_socket && look_at_sockets) && !link_ready(link) && link->state == LINK_OPEN) {
        link_needs_looking(link);           // which looks
        return false;
    }
    uint64_t payload_before = link->payload_sent + link->payload_received;
    bhvd_status status = link_advance(link, run->duties->on_frame, run->owner, &moved);
    uint64_t payload = link->payload_sent + link->payload_received - payload_before;
    run->messages_moved += payload;
    if (status) {
        fail_link(run, link, status);
    } else if (link->state == LINK_LEFT && !moved &&
               (traffic_is_pending(&link->sends) || (traffic_is_pending(&link->receives) && !by_socket))) {
        run_blame(run, BHVD_ERR_PEER_LOST, BHVD_CAUSE_LEFT, link->rank,
                  "rank %d left the job while an operation still needed it", link->rank);
    }
    if (payload && by_socket)
        atomic_fetch_add_explicit(&run->connections.bell.word->activity, 1, memory_order_relaxed);
    return moved;
}

bool run_advance_links(struct run *run, bool look_at_sockets)
{
    bool progress = false;
    for (int rank = 0; rank < run->connections.size && !run->failure.status; rank++) {
        if (rank != run->connections.rank)
            progress |= advance(run, &run->connections.links[rank], look_at_sockets);
    }
    progress |= executor_advance(run);
    return progress;
}

bool run_links_need_looking(const struct run *run)
{
    for (int rank = 0; rank < run->connections.size && !run->failure.status; rank++) {
        if (rank != run->connections.rank && link_needs_looking(&run->connections.links[rank]))
            return true;
    }
    return false;
}

bool run_links_are_ready(const struct run *run)
{
    for (int rank = 0; rank < run->connections.size; rank++) {
        if (rank != run->connections.rank && link_ready(&run->connections.links[rank]))
            return true;
    }
    return false;
}

// A liveness socket says something only when its peer is gone.
void run_look_at_liveness(struct run *run)
{
    for (int rank = 0; rank < run->connections.size && !run->failure.status; rank++) {
        struct link *link = &run->connections.links[rank];
        if (rank == run->connections.rank || link->state != LINK_OPEN || link->liveness_fd < 0)
            continue;
        struct pollfd fd = {.fd = link->liveness_fd, .events = POLLIN | POLLRDHUP};
        bool progress = false;
        if (poll(&fd, 1, 0) > 0) {
            link_hang_up(link, run->duties->on_frame, run->owner, &progress);
            if (link->state == LINK_LOST)
                fail_link(run, link, BHVD_ERR_PEER_LOST);
        }
    }
}
