"""Shared by jobs of fixed and of changing size: the plan, a rank's environment and output, the end of a job."""
import functools
import ipaddress
import os
import re
import signal
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from bagua_hvd.job import reporting
from bagua_hvd.job.channel import HOROVOD_SECRET_KEY
from bagua_hvd.job.server import EVERY_INTERFACE
from bagua_hvd.runner.common.util import hosts
from bagua_hvd.runner.common.util.hosts import SlotInfo
from bagua_hvd.runner.output import Console, LineForwarder

LOOPBACK = "lo"


class WorkerFailed(RuntimeError):
    """A rank ended with a nonzero exit code, and the job with it.

    Attributes:
        rank; exit_code: 128 + n if signal n ended it. process: its name among all processes of the job: the rank, or
            in elastic jobs its number.

    Args:
        details: text after the sentence. process: None: the rank.
    """

    def __init__(self, rank: int, exit_code: int, details: str = "", process: int | None = None) -> None:
        super().__init__(
            "Horovod detected that one or more processes exited with non-zero status, thus causing the job to be "
            f"terminated. The first process to do so was: Process name: {rank}, Exit code: {exit_code}"
            + _signal_note(exit_code) + details)
        self.rank = rank
        self.exit_code = exit_code
        self.process = rank if process is None else process


def first_cause(first: int | None, because_of: Mapping[int | None, int | None]) -> int | None:
    """Follows the causes from `first` to a failed process whose cause has not failed; in a cycle, returns `first`.

    Args:
        first: the first one known to have failed; others may have failed before.
        because_of: {failed process: the process that made it fail, or None}.
    """
    cause, seen = first, set()
    while because_of[cause] in because_of:
        if cause in seen:
            return first
        seen.add(cause)
        cause = because_of[cause]
    return cause


class Interrupted(Exception):
    """A signal stopped the job. Attribute signum; SIGPIPE: the output is not read any more."""

    def __init__(self, signum: int) -> None:
        why = "the reader of the output has closed it: " if signum == signal.SIGPIPE else ""
        super().__init__(f"{why}stopped by {signal.Signals(signum).name}")
        self.signum = signum


def _signal_note(exit_code):
    try:
        return f" ({signal.Signals(exit_code - 128).name})"
    except ValueError:
        return ""


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


def _resolved(hostname):
    try:
        return {ipaddress.ip_address(str(info[4][0]).partition("%")[0]) for info in socket.getaddrinfo(hostname, None)}
    except (OSError, UnicodeError):
        return set()        # only ssh can resolve it


def _is_own(address):
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


def plan(num_proc: int, hosts_string: str | None = None) -> list[SlotInfo]:
    """SlotInfos for num_proc ranks.

    Args:
        hosts_string: `h1:2,h2:2`; None: this host, with as many slots as ranks.
    Raises:
        ValueError: malformed, or too few slots.
    """
    infos = hosts.parse_hosts(f"localhost:{num_proc}" if hosts_string is None else hosts_string)
    try:
        return hosts.get_host_assignments(infos, num_proc, num_proc)
    except ValueError as error:
        raise ValueError(f"{error}: ask for fewer processes, or give the hosts more slots") from None


def worker_environment(env: Mapping[str, str], slot: SlotInfo, address: str, port: int, secret_key: bytes,
                       interface: str = LOOPBACK) -> dict[str, str]:
    """The environment of the rank at `slot`: the launcher's own, `env`, and the variables of the job.

    Args:
        address, port: of the rendezvous. secret_key: base64 bytes.
        interface: of the rank's host, for connections to other ranks.
    """
    # The command has no use for exported shell functions, and older shells fail on their names. Variables of an outer
    # elastic job do not apply to this one.
    result = {name: value for name, value in env.items()
              if not name.startswith(("BASH_FUNC_", "BAGUA_HVD_ELASTIC_"))
              and name not in ("OLDPWD", "HOROVOD_ELASTIC")}
    result.update({
        **slot.environment,
        "HOROVOD_HOSTNAME": slot.hostname,
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": address,
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
        "HOROVOD_GLOO_IFACE": interface,
        HOROVOD_SECRET_KEY: secret_key.decode(),
        reporting.PIPE: "",         # see processes.Process
    })
    result.setdefault("PYTHONUNBUFFERED", "1")
    return result


def as_horovod_environment(env: Mapping[str, str]) -> dict[str, str]:
    """`env` with startup/ first in PYTHONPATH: `import horovod` then gives bagua_hvd in every Python started."""
    folder = str(Path(__file__).with_name("startup"))
    return {**env, "PYTHONPATH": os.pathsep.join(filter(None, [folder, env.get("PYTHONPATH")]))}


@dataclass
class OutputOptions:
    """A directory for the ranks' output, besides the console, and whether lines carry the time."""

    directory: str | None = None
    timestamp: bool = False


def forwarders(console: Console, slot: SlotInfo, output: OutputOptions) -> list[LineForwarder]:
    """The LineForwarders of a rank's stdout and stderr, with files `rank.<rank>/stdout` and `stderr` if requested."""
    streams = ("stdout", "stderr")
    files: list[BinaryIO | None] = [None, None]
    if output.directory is not None:
        # Zero-padded, so that listings are in rank order.
        folder = os.path.join(output.directory, f"rank.{slot.rank:0{len(str(slot.size - 1))}}")
        os.makedirs(folder, exist_ok=True)
        files = [open(os.path.join(folder, stream), "wb") for stream in streams]
    return [LineForwarder(console, slot.rank, stream, output.timestamp, file)
            for stream, file in zip(streams, files, strict=True)]
