"""Hosts with slots, the plan that assigns the ranks to them, and whether a name denotes this host."""
import functools
import ipaddress
import os
import re
import socket
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bagua_hvd.job.environment import PLACE
from bagua_hvd.job.server import EVERY_INTERFACE

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
    sizes, seen = Counter(hosts), Counter[str]()
    # By local rank: the cross ranks of the hosts that have it.
    cross_ranks = [{host: i for i, host in enumerate(host for host in sizes if sizes[host] > local_rank)}
                   for local_rank in range(max(sizes.values(), default=0))]
    slots = []
    for rank, host in enumerate(hosts):
        local_rank = seen[host]
        seen[host] += 1
        slots.append(SlotInfo(host, rank, local_rank, cross_ranks[local_rank][host], len(hosts), sizes[host],
                              len(cross_ranks[local_rank])))
    return slots


def plan(num_proc: int, hosts_string: str | None = None) -> list[SlotInfo]:
    """SlotInfos for num_proc ranks.

    Args:
        hosts_string: `h1:2,h2:2`; None: this host, with as many slots as ranks.
    Raises:
        ValueError: malformed, or too few slots.
    """
    infos = parse_hosts(f"localhost:{num_proc}" if hosts_string is None else hosts_string)
    try:
        return get_host_assignments(infos, num_proc, num_proc)
    except ValueError as error:
        raise ValueError(f"{error}: ask for fewer processes, or give the hosts more slots") from None


@functools.cache      # a name server may take seconds for a name that only ssh knows
def is_local(hostname: str) -> bool:
    """Whether the name denotes this host: localhost, its own name, or an address of one of its interfaces."""
    own = socket.gethostname().lower()
    if hostname.lower() in {"localhost", own, own.split(".")[0]}:
        return True
    try:
        found = {ipaddress.ip_address(hostname)}
    except ValueError:
        found = _resolved(hostname)
    return bool(found) and all(address.is_loopback or address.is_unspecified or _is_own(address) for address in found)


def _resolved(hostname: str) -> set[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    try:
        return {ipaddress.ip_address(str(info[4][0]).partition("%")[0]) for info in socket.getaddrinfo(hostname, None)}
    except (OSError, UnicodeError):
        return set()        # only ssh can resolve it


def _is_own(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    """Whether an interface has the address. With ip_nonlocal_bind, binding to it would prove nothing; and packets to an
    interface's second address have the first one as their source."""
    try:
        if address.version == 6:
            return f"{int(address):032x}" in Path("/proc/net/if_inet6").read_text()
        routes = Path("/proc/net/fib_trie").read_text()
        return re.search(rf"\|-- {re.escape(str(address))}\n(\s*/\d+ .*\n)*?\s*/32 host LOCAL", routes) is not None
    except OSError:
        return False


def bind_address(hosts: Iterable[str]) -> str:
    """The address at which the launcher of a job on these hosts listens: loopback, or every interface."""
    return "127.0.0.1" if all(map(is_local, hosts)) else EVERY_INTERFACE
