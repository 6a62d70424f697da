"""The environment of this process: the variables of the launcher and the user, read once at init into one Options
object; its rank, before init() and without the native core; its host.
"""
import hashlib
import ipaddress
import os
import socket
import warnings
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bagua_hvd.core import variables
from bagua_hvd.core.variables import integer
from bagua_hvd.job import probe

# The variables by which our launcher tells a process its place in the job.
PLACE = ("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE", "HOROVOD_CROSS_RANK",
         "HOROVOD_CROSS_SIZE")
# In order of precedence: our launcher, Open MPI, MPICH and its relatives.
_PAIRS = (
    ("HOROVOD_RANK", "HOROVOD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
)


def get_env_rank_and_size() -> tuple[int, int]:
    """(rank, size) as set by the launcher of this process; (0, 1) without a launcher.

    Raises:
        RuntimeError: only one variable of a pair is set. ValueError: not a number.
    """
    for rank_name, size_name in _PAIRS:
        rank, size = os.environ.get(rank_name), os.environ.get(size_name)
        if rank is not None and size is not None:
            try:
                return int(rank), int(size)
            except ValueError:
                raise ValueError(f"environment variables {rank_name}={rank!r}, {size_name}={size!r}: expected two "
                                 "integers") from None
        if rank is not None or size is not None:
            present, missing = (rank_name, size_name) if size is None else (size_name, rank_name)
            raise RuntimeError(f"environment variable {present} is set, but {missing} is not: set both or neither")
    return 0, 1


@dataclass
class Options:
    """Arguments of a context: the fields of struct bhvd_context_options, and a few that only Python needs."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    cross_rank: int = 0
    cross_size: int = 1
    transport: str = "auto"
    rendezvous_host: str | None = None
    rendezvous_port: int = 0
    scope: str = "init.1"
    listen_host: str = "127.0.0.1"
    listen_port: int = 0
    listen_port_last: int = 0
    host_id: str | None = None
    secret: bytes = b""
    inproc_world: object = None
    fusion_threshold: int = 128 * variables.MIB
    cache_capacity: int = 1024
    start_timeout_ms: int = 30_000
    timeout_ms: int = 30_000
    heartbeat_timeout_ms: int = 30_000
    stall_warning_ms: int = 60_000
    stall_shutdown_ms: int = 0
    allreduce_path: str | None = None
    streams: int = 0
    emulated_bytes_per_s: int = 0
    known_bytes_per_s: int = 0
    negotiation: str | None = None
    negotiation_fanout: int = 16
    nccl_hierarchical: int = 0
    dynamic_process_sets: bool = False
    elastic: bool = False
    timeline: str | None = None         # a file; "DYNAMIC": may be started later; None: may not
    timeline_mark_cycles: bool = False


def read_options(environ: Mapping[str, str] | None = None) -> Options:
    """The Options that the environment describes; a job of one rank without launcher variables.

    Raises:
        ValueError: a malformed variable, or more than one rank without a rendezvous.
    """
    def read(name, kind=None):
        return variables.read(name, environ, kind)

    def milliseconds(name):
        return int(read(name) * 1000)

    size, local_size, cross_size = read("HOROVOD_SIZE"), read("HOROVOD_LOCAL_SIZE"), read("HOROVOD_CROSS_SIZE")
    options = Options(
        rank=read("HOROVOD_RANK", integer(0, size - 1)), size=size,
        local_rank=read("HOROVOD_LOCAL_RANK", integer(0, local_size - 1)), local_size=local_size,
        cross_rank=read("HOROVOD_CROSS_RANK", integer(0, cross_size - 1)), cross_size=cross_size,
        transport=read("BAGUA_HVD_TRANSPORT"),
        allreduce_path=read("BAGUA_HVD_ALLREDUCE") or (None if read("BAGUA_HIERARCHY") else "ring"),
        streams=read("BAGUA_HVD_STREAMS"), emulated_bytes_per_s=read("BAGUA_HVD_EMULATED_MBITS") * 1_000_000 // 8,
        negotiation=read("BAGUA_HVD_NEGOTIATION"), negotiation_fanout=read("BAGUA_HVD_NEGOTIATION_FANOUT"),
        # When NCCL runs only within hosts: 2: whenever there are several hosts; 1: in allreduces; 0: only if it must.
        nccl_hierarchical=2 if read("BAGUA_HVD_NCCL") == "local" else int(read("HOROVOD_HIERARCHICAL_ALLREDUCE")),
        host_id=read("BAGUA_HVD_HOST_ID"), cache_capacity=read("HOROVOD_CACHE_CAPACITY"),
        fusion_threshold=read("HOROVOD_FUSION_THRESHOLD") if read("BAGUA_FUSION") else 0,
        start_timeout_ms=milliseconds("HOROVOD_START_TIMEOUT"),
        timeout_ms=milliseconds("HOROVOD_GLOO_TIMEOUT_SECONDS"),
        heartbeat_timeout_ms=milliseconds("BAGUA_HVD_HEARTBEAT_TIMEOUT_SECONDS"),
        stall_warning_ms=milliseconds("HOROVOD_STALL_CHECK_TIME_SECONDS"),
        stall_shutdown_ms=milliseconds("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"),
        dynamic_process_sets=read("HOROVOD_DYNAMIC_PROCESS_SETS"), elastic=read("HOROVOD_ELASTIC"),
        timeline=read("HOROVOD_TIMELINE"), timeline_mark_cycles=read("HOROVOD_TIMELINE_MARK_CYCLES"))
    if 0 < options.stall_shutdown_ms < options.stall_warning_ms:
        warnings.warn("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS is below HOROVOD_STALL_CHECK_TIME_SECONDS and therefore "
                      "ignored", stacklevel=2)
        options.stall_shutdown_ms = 0
    if read("HOROVOD_STALL_CHECK_DISABLE"):
        options.stall_warning_ms = options.stall_shutdown_ms = 0
    if size > 1:
        _read_rendezvous(read, options)
    variables.check(environ)    # those that are read later, too: an error may not wait for the first optimizer
    return options


def _read_rendezvous(read, options):
    host = read("HOROVOD_GLOO_RENDEZVOUS_ADDR")
    if host is None or read("HOROVOD_GLOO_RENDEZVOUS_PORT", variables.TEXT) is None:
        raise ValueError(
            f"HOROVOD_SIZE={options.size}, but HOROVOD_GLOO_RENDEZVOUS_ADDR and HOROVOD_GLOO_RENDEZVOUS_PORT are not "
            f"set, so the rendezvous is unknown: start the job with `baguarun -np {options.size} python <script>`."
        )
    options.rendezvous_port = read("HOROVOD_GLOO_RENDEZVOUS_PORT", integer(1, 65535))
    try:
        options.rendezvous_host = resolve(host)
    except OSError as error:
        raise ValueError(
            f"environment variable HOROVOD_GLOO_RENDEZVOUS_ADDR={host!r}: expected an address or a name that "
            f"resolves to one ({error})"
        ) from None
    options.secret = read("_HOROVOD_SECRET_KEY")
    if not options.secret:
        raise ValueError(
            "environment variable _HOROVOD_SECRET_KEY is missing: the ranks of a job authenticate with it. "
            f"Start the job with `baguarun -np {options.size} python <script>`, which sets it."
        )
    options.listen_host = _listen_host(read, options)
    ports = read("BAGUA_HVD_PORTS")
    options.listen_port, options.listen_port_last = ports[0], ports[-1]


def resolve(host: str) -> str:
    """A numeric address of a host: IPv4 if it has one, else IPv6. OSError: neither."""
    try:
        return socket.gethostbyname(host)
    except OSError:
        return str(socket.getaddrinfo(host, None, socket.AF_INET6)[0][4][0])


def _listen_host(read, options):
    """The address at which other ranks can reach this one."""
    interfaces = read("HOROVOD_GLOO_IFACE")
    if interfaces is None:
        return local_address_towards(options.rendezvous_host)
    addresses = addresses_of(interfaces)
    return next(addresses[interface] for interface in interfaces if interface in addresses)


def addresses_of(interfaces: Collection[str] | None) -> dict[str, str]:
    """{name: address} of this host, as probe.addresses(). ValueError: it has none of the interfaces; None: all."""
    addresses = dict(probe.addresses(interfaces))
    if interfaces and not addresses:
        known = ", ".join(sorted(dict(probe.addresses())))
        raise ValueError(f"environment variable HOROVOD_GLOO_IFACE={','.join(interfaces)!r}: expected one of {known}")
    return addresses


def local_address_towards(host: str) -> str:
    """The local address in packets to `host`. Sends nothing."""
    by_6 = ":" in host
    if ipaddress.ip_address(host).is_loopback:
        return "::1" if by_6 else "127.0.0.1"
    with socket.socket(socket.AF_INET6 if by_6 else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))
            return probe.getsockname()[0]
        except OSError as error:
            raise ValueError(f"HOROVOD_GLOO_RENDEZVOUS_ADDR={host}: no route from this host ({error})") from None


# Processes that differ in one of these namespaces do not share memory or network, although they share the kernel.
_NAMESPACES = ("ipc", "mnt", "net", "pid", "user", "uts")


def _identity():
    """The kernel's boot, and the namespaces: hosts of one name that were just started have equal namespace numbers."""
    with suppress(OSError):
        yield Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    for name in _NAMESPACES:
        with suppress(OSError):
            yield os.readlink(f"/proc/self/ns/{name}")


def host_hash(salt: Any = None) -> str:
    """Text that is equal in all processes of a host and container, and begins with the host's short name.

    Args:
        salt: processes with an equal salt form a host of their own; None: no salt.
    """
    hostname = socket.gethostname()
    text = f"{hostname}-{','.join(_identity())}" + ("" if salt is None else f"-{salt}")
    return f"{hostname.split('.')[0]}-{hashlib.sha256(text.encode()).hexdigest()[:32]}"
