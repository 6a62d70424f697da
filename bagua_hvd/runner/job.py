"""What jobs of fixed and of changing size share: the plan, the environment of a rank, its output, how a job ends."""
import functools
import ipaddress
import os
import signal
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from bagua_hvd.job import reporting
from bagua_hvd.job.secret import HOROVOD_SECRET_KEY
from bagua_hvd.runner.common.util import hosts
from bagua_hvd.runner.output import LineForwarder

LOOPBACK = "lo"


class WorkerFailed(RuntimeError):
    """A rank ended with a nonzero exit code, and the job with it.

    Attributes:
        rank; exit_code: 128 + n when signal n ended it. process: its name among all processes of the job: the rank,
            in elastic jobs its number.
        because_of: the process that made it fail, by way of others perhaps, ended or not; itself if none did.

    Args:
        details: text that follows the sentence. process: None: the rank.
    """

    def __init__(self, rank, exit_code, details="", process=None):
        super().__init__(
            "Horovod detected that one or more processes exited with non-zero status, thus causing the job to be "
            f"terminated. The first process to do so was: Process name: {rank}, Exit code: {exit_code}"
            + _signal_note(exit_code) + details)
        self.rank = rank
        self.exit_code = exit_code
        self.process = self.because_of = rank if process is None else process


def first_cause(first, because_of):
    """What made `first` fail, or what made that fail, and so on, of those that failed; in a circle, `first`.

    Args:
        first: the first that is known to have failed: it need not have been the first to do so.
        because_of: {each that failed: which one made it fail, or None}.
    """
    cause, seen = first, set()
    while because_of[cause] in because_of:
        if cause in seen:
            return first
        seen.add(cause)
        cause = because_of[cause]
    return cause


class Interrupted(Exception):
    """A signal stopped the job. Attribute signum; SIGPIPE: nobody reads the output any more."""

    def __init__(self, signum):
        why = "nobody reads the output any more, " if signum == signal.SIGPIPE else ""
        super().__init__(f"{why}stopped by {signal.Signals(signum).name}")
        self.signum = signum


def _signal_note(exit_code):
    try:
        return f" ({signal.Signals(exit_code - 128).name})"
    except ValueError:
        return ""


@functools.cache      # a name server may take seconds for a name that only ssh knows
def is_local(hostname):
    """Whether the name means this host: localhost, the host's own name, or an address of one of its interfaces."""
    own = socket.gethostname().lower()
    if hostname.lower() in {"localhost", own, own.split(".")[0]}:
        return True
    try:
        found = {ipaddress.ip_address(hostname)}
    except ValueError:
        found = _resolved(hostname)
    return bool(found) and all(address.is_loopback or _is_own(address) for address in found)


def _resolved(hostname):
    try:
        return {ipaddress.ip_address(str(info[4][0]).partition("%")[0]) for info in socket.getaddrinfo(hostname, None)}
    except (OSError, UnicodeError):
        return set()        # only ssh knows it


def _is_own(address):
    """Whether a socket can be bound to it: a question that needs no list of interfaces."""
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((str(address), 0))
            return True
    except OSError:
        return False


def plan(num_proc, hosts_string=None):
    """SlotInfos for num_proc ranks.

    Args:
        hosts_string: `h1:2,h2:2`; None: as many slots on this host as ranks.
    Raises:
        ValueError: malformed, or too few slots.
    """
    infos = hosts.parse_hosts(f"localhost:{num_proc}" if hosts_string is None else hosts_string)
    try:
        return hosts.get_host_assignments(infos, num_proc, num_proc)
    except ValueError as error:
        raise ValueError(f"{error}: ask for fewer processes, or give the hosts more slots") from None


def worker_environment(env, slot, address, port, secret_key, interface=LOOPBACK):
    """The environment of the rank at `slot`: what the launcher's own, `env`, holds and a job needs besides.

    Args:
        slot: SlotInfo.
        address, port: where the ranks meet.
        secret_key: base64 bytes.
        interface: of the rank's host, for the connections with other ranks.
    """
    # Exported shell functions are no use to the command, and older shells choke on their names.
    # A job within an elastic job is its own.
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


def as_horovod_environment(env):
    """`env` with startup/ as the first of PYTHONPATH: `import horovod` gives bagua_hvd in every Python started."""
    folder = str(Path(__file__).with_name("startup"))
    return {**env, "PYTHONPATH": os.pathsep.join(filter(None, [folder, env.get("PYTHONPATH")]))}


@dataclass
class OutputOptions:
    """Where the ranks' output goes besides the console (directory), and whether lines carry the time."""

    directory: str | None = None
    timestamp: bool = False


def forwarders(console, slot, output):
    """The LineForwarders of a rank's stdout and stderr, with files `rank.<rank>/stdout` and `stderr` when asked for."""
    streams = ("stdout", "stderr")
    files: list[BinaryIO | None] = [None, None]
    if output.directory is not None:
        # Zero-padded, so that a listing is in the order of the ranks.
        folder = os.path.join(output.directory, f"rank.{slot.rank:0{len(str(slot.size - 1))}}")
        os.makedirs(folder, exist_ok=True)
        files = [open(os.path.join(folder, stream), "wb") for stream in streams]
    return [LineForwarder(console, slot.rank, stream, output.timestamp, file)
            for stream, file in zip(streams, files, strict=True)]
