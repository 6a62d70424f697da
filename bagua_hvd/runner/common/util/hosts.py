"""Hosts with slots, and the plan that assigns the ranks to them."""
import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from bagua_hvd.job.environment import PLACE

_HOST = re.compile(r"(?:(?P<name>[\w.-]+)|\[(?P<address>[\da-fA-F]*:[\da-fA-F:.]+)\])(?::(?P<slots>\d+))?", re.ASCII)
# Open MPI's format; its max_slots has no meaning for a job with a given number of ranks.
_HOST_FILE_LINE = re.compile(
    r"(?P<name>\S+?)(?::(?P<colon>\d+)|\s+slots\s*=\s*(?P<slots>\d+))?(?:\s+max[_-]slots\s*=\s*\d+)?", re.ASCII)


@dataclass(frozen=True)
class HostInfo:
    """A host and its number of slots for processes."""

    hostname: str
    slots: int

    @staticmethod
    def from_string(host_string: str) -> "HostInfo":
        """From `name:slots`, or `name` for one slot; an address as `[fd00::2]:slots`.

        ValueError: another form, or no slots.
        """
        match = _HOST.fullmatch(host_string.strip())
        if "@" in host_string:
            raise ValueError(f"host {host_string!r}: give its name alone, and the user in ~/.ssh/config (Host, User)")
        if not match:
            raise ValueError(f"host {host_string!r}: expected name:slots, such as localhost:4 or [fd00::2]:4")
        slots = int(match["slots"] or 1)
        if slots == 0:
            raise ValueError(f"host {host_string!r} has 0 slots: give it at least 1, or leave it out")
        return HostInfo(match["name"] or match["address"], slots)


@dataclass
class SlotInfo:
    """One rank's host and its rank, local rank and cross rank, with the sizes."""

    hostname: str
    rank: int
    local_rank: int
    cross_rank: int
    # Every plan sets them; None is Horovod's default.
    size: int = None            # type: ignore[assignment]
    local_size: int = None      # type: ignore[assignment]
    cross_size: int = None      # type: ignore[assignment]

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables that tell a process its rank."""
        return {name: str(getattr(self, name.removeprefix("HOROVOD_").lower())) for name in PLACE}


INVALID_SLOT_INFO = SlotInfo("", -1, -1, -1, -1, -1, -1)


def parse_hosts(hosts_string: str) -> list[HostInfo]:
    """The HostInfos of `h1:2,h2:4`, in this order. ValueError: a malformed entry, or none."""
    if not hosts_string.strip():
        raise ValueError("the list of hosts is empty: expected name:slots,name:slots, such as localhost:4")
    return [HostInfo.from_string(host) for host in hosts_string.split(",")]


def parse_hosts_and_slots(hosts: str) -> tuple[list[str], dict[str, int]]:
    """([names in order], {name: slots}) of `h1:2,h2:4`; a name given twice has all its slots. ValueError: malformed."""
    slots: Counter[str] = Counter()
    for info in parse_hosts(hosts):
        slots[info.hostname] += info.slots
    return list(slots), dict(slots)


def parse_host_files(filename: str | os.PathLike[str]) -> str:
    """`h1:2,h2:4` from a file with lines `h1 slots=2`. Skips empty lines and comments after a #.

    Raises:
        ValueError: a malformed line (the message has its number), no host, or not text. OSError: cannot read the file.
    """
    hosts = []
    with open(filename, encoding="utf-8-sig") as file:
        try:
            lines = list(file)
        except UnicodeDecodeError:
            raise ValueError(f"{filename} is not text in UTF-8: save it so, with lines `name slots=N`") from None
        for number, text in enumerate(lines, 1):
            line = text.partition("#")[0].strip()
            if line:
                match = _HOST_FILE_LINE.fullmatch(line)
                if not match:
                    raise ValueError(f"{filename}, line {number}: expected `name slots=N`, not {line!r}")
                hosts.append(f"{match['name']}:{match['slots'] or match['colon'] or 1}")
    if not hosts:
        raise ValueError(f"{filename} names no host: expected lines of the form `name slots=N`")
    return ",".join(hosts)


def get_host_assignments(hosts: Sequence[HostInfo], min_num_proc: int,
                         max_num_proc: int | None = None) -> list[SlotInfo]:
    """The plan: SlotInfos in the order of the ranks, which fill the hosts in the given order.

    Args:
        max_num_proc: maximum number of ranks; None: every slot is used.
    Raises:
        ValueError: fewer than min_num_proc slots.
    """
    available = sum(host.slots for host in hosts)
    if available < min_num_proc:
        raise ValueError(f"Requested more processes ({min_num_proc}) than there are available slots ({available})")
    size = available if max_num_proc is None else min(available, max_num_proc)
    return slots_on([host.hostname for host in hosts for _ in range(host.slots)][:size])


def slots_on(hosts: Sequence[str]) -> list[SlotInfo]:
    """SlotInfos, in rank order, of ranks that already have hosts.

    The cross rank of a slot is the index of its host among the hosts that have its local rank.

    Args:
        hosts: the host of each rank. The ranks of a host need not be consecutive.
    """
    sizes: Counter[str] = Counter(hosts)
    seen: Counter[str] = Counter()
    hosts_with: Counter[int] = Counter()        # by local rank
    cross_ranks: dict[tuple[str, int], int] = {}          # by host and local rank
    for host, size in sizes.items():
        for local_rank in range(size):
            cross_ranks[host, local_rank] = hosts_with[local_rank]
            hosts_with[local_rank] += 1
    slots = []
    for rank, host in enumerate(hosts):
        local_rank = seen[host]
        seen[host] += 1
        slots.append(SlotInfo(host, rank, local_rank, cross_ranks[host, local_rank], len(hosts), sizes[host],
                              hosts_with[local_rank]))
    return slots
