"""Ranks for the members of a rendezvous, and hosts for more workers.

Workers with the state come first: rank 0 broadcasts its state to all others, so it must have it. The workers of a host
have consecutive ranks.
"""
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import Enum

from bagua_hvd.runner.common.util.hosts import HostInfo, SlotInfo, get_host_assignments


class Phase(Enum):
    STARTING = "starting"
    WAITING = "waiting"
    RUNNING = "running"
    LEAVING = "leaving"


@dataclass(eq=False)
class Worker:
    """The driver's record of a process.

    Attributes:
        number: of this process, never reused. label: its rank, for messages; at first the expected one.
        since: when the phase began. rank: in the present generation; None: it is not a member.
        has_state: it has synchronized the job's state. syncs: it has begun to do so since the last rendezvous.
        skip_sync, failure, silent: of its last ElasticDriver.joined().
        respond_by: deadline for its response to a Ping; None: it got no Ping since the last rendezvous.
        leave_by: in LEAVING, when it will be stopped; None: it was stopped.
    """

    number: int
    host: str
    since: float
    label: int | None = None
    phase: Phase = Phase.STARTING
    rank: int | None = None
    has_state: bool = False
    syncs: bool = False
    skip_sync: bool = False
    failure: str | None = None
    silent: int | None = None
    respond_by: float | None = None
    leave_by: float | None = None


def seniority(worker: Worker) -> tuple[bool, float, int]:
    """Sort key of workers: first those with the job's state by their last ranks, then the others by their start."""
    rank = float("inf") if worker.rank is None else worker.rank
    return not worker.has_state, rank, worker.number


def fit(workers: Iterable[Worker], leaving: Iterable[Worker], hosts: dict[str, int],
        limit: int | None) -> tuple[list[Worker], list[str]]:
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
    staying: list[Worker] = []
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


def assign(members: Collection[Worker], hosts: Iterable[str]) -> dict[Worker, SlotInfo]:
    """{worker: SlotInfo} for the members of a rendezvous. The order of `hosts` decides between those without state."""
    by_host: dict[str, list[Worker]] = {}
    for worker in sorted(members, key=seniority):
        by_host.setdefault(worker.host, []).append(worker)
    order = {host: i for i, host in enumerate(hosts)}
    # By the most senior worker. Among workers without a rank, the order of the hosts counts more than their numbers.
    ordered = sorted(by_host, key=lambda host: (*seniority(by_host[host][0])[:2], order.get(host, len(order))))
    infos = [HostInfo(host, len(by_host[host])) for host in ordered]
    slots = get_host_assignments(infos, len(members), len(members))
    return dict(zip((worker for host in ordered for worker in by_host[host]), slots, strict=True))
