"""Ranks for the members of a rendezvous, and hosts for more workers.

Workers with the state come first: rank 0 broadcasts its state to all others, so it must have it. The workers of a host
have consecutive ranks.
"""
from bagua_hvd.runner.common.util.hosts import HostInfo, get_host_assignments


def seniority(worker):
    """Sort key of workers: first those with the job's state by their last ranks, then the others by their start.

    Args:
        worker: has has_state, rank (None: it never had one) and number.
    """
    rank = float("inf") if worker.rank is None else worker.rank
    return not worker.has_state, rank, worker.number


def fit(workers, leaving, hosts, limit):
    """Decides which workers stay, and where further ones are started.

    Args:
        workers: those that can continue. leaving: those that still occupy slots on their hosts.
        hosts: {host: slots}, in order. limit: maximum number of ranks; None: none.
    Returns:
        (workers that stay, by seniority; list of hosts, one entry for each worker to start there)
    """
    room = dict(hosts)
    for worker in leaving:
        if worker.host in room:
            room[worker.host] -= 1
    staying: list = []
    for worker in sorted(workers, key=seniority):
        if hosts.get(worker.host, 0) > sum(other.host == worker.host for other in staying) and (
                limit is None or len(staying) < limit):
            staying.append(worker)
            room[worker.host] -= 1
    free = float("inf") if limit is None else limit - len(staying)
    places = []
    for host, slots in room.items():
        count = int(min(max(slots, 0), free))
        places += [host] * count
        free -= count
    return staying, places


def assign(members, hosts):
    """{worker: SlotInfo} for the members of a rendezvous.

    Args:
        hosts: names in order; decides between hosts without the job's state.
    """
    by_host: dict[str, list] = {}
    for worker in sorted(members, key=seniority):
        by_host.setdefault(worker.host, []).append(worker)
    order = {host: i for i, host in enumerate(hosts)}
    # By the most senior worker. Among workers without a rank, the order of the hosts counts more than their numbers.
    ordered = sorted(by_host, key=lambda host: (*seniority(by_host[host][0])[:2], order.get(host, len(order))))
    infos = [HostInfo(host, len(by_host[host])) for host in ordered]
    slots = get_host_assignments(infos, len(members), len(members))
    return dict(zip((worker for host in ordered for worker in by_host[host]), slots, strict=True))
