"""The environment variables of the launcher and the user, read once at init into one Options object."""
import base64
import binascii
import ipaddress
import math
import os
import socket
import warnings
from dataclasses import dataclass

MIB = 1 << 20
TRANSPORTS = ("auto", "shm", "tcp", "mpi")


@dataclass
class Options:
    """What a context is created from: the fields of struct bhvd_context_options, and what Python needs besides."""

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
    host_id: str | None = None
    secret: bytes = b""
    inproc_world: object = None
    fusion_threshold: int = 128 * MIB
    cache_capacity: int = 1024
    start_timeout_ms: int = 30_000
    timeout_ms: int = 30_000
    heartbeat_timeout_ms: int = 30_000
    stall_warning_ms: int = 60_000
    stall_shutdown_ms: int = 0
    allreduce_path: str | None = None
    streams: int = 1
    negotiation: str | None = None
    negotiation_fanout: int = 16
    nccl_levels: int = 0
    dynamic_process_sets: bool = False
    elastic: bool = False
    timeline: str | None = None         # a file, or "DYNAMIC": may be started later; None: may not
    timeline_mark_cycles: bool = False


class _Reader:
    """Reads variables of one mapping, with errors that name variable, value and what is expected."""

    def __init__(self, environ):
        self.environ = environ

    def text(self, name, default=None):
        value = self.environ.get(name, "").strip()
        return value or default

    def _wrong(self, name, expected):
        return ValueError(f"environment variable {name}={self.environ[name]!r}: expected {expected}")

    def integer(self, name, default, low, high=2**31 - 1):
        text = self.text(name)
        if text is None:
            return default
        try:
            value = int(text)
        except ValueError:
            value = None
        if value is None or not low <= value <= high:
            raise self._wrong(name, f"an integer from {low} to {high}")
        return value

    def flag(self, name):
        text = self.text(name)
        if text is None:
            return False
        try:
            return int(text) > 0
        except ValueError:
            raise self._wrong(name, "0 or 1") from None

    def milliseconds(self, name, default_s, allow_zero=False):
        """A time in seconds, as milliseconds."""
        text = self.text(name)
        if text is None:
            return int(default_s * 1000)
        try:
            seconds = float(text)
        except ValueError:
            seconds = math.nan
        if not (0 if allow_zero else 0.001) <= seconds <= 2_000_000:
            raise self._wrong(name, "a time in seconds, " + ("0 or more" if allow_zero else "more than 0"))
        return int(seconds * 1000)

    def choice(self, name, default, choices):
        text = self.text(name, default).lower()
        if text not in choices:
            raise self._wrong(name, "one of " + ", ".join(choices))
        return text

    def secret(self, name):
        try:
            return base64.b64decode(self.environ.get(name, ""), validate=True)
        except (binascii.Error, ValueError):
            # The value stays out of the sentence: it is a secret.
            raise ValueError(f"environment variable {name}: expected base64 text") from None


def read_options(environ=None):
    """The Options that the environment describes; without launcher variables a job of one rank.

    Raises:
        ValueError: a malformed variable, or more than one rank without a rendezvous.
    """
    read = _Reader(os.environ if environ is None else environ)
    options = Options()
    options.size = size = read.integer("HOROVOD_SIZE", 1, 1)
    options.rank = read.integer("HOROVOD_RANK", 0, 0, size - 1)
    options.local_size = read.integer("HOROVOD_LOCAL_SIZE", 1, 1)
    options.local_rank = read.integer("HOROVOD_LOCAL_RANK", 0, 0, options.local_size - 1)
    options.cross_size = read.integer("HOROVOD_CROSS_SIZE", 1, 1)
    options.cross_rank = read.integer("HOROVOD_CROSS_RANK", 0, 0, options.cross_size - 1)
    options.transport = read.choice("BAGUA_HVD_TRANSPORT", "auto", TRANSPORTS)
    options.allreduce_path = read.text("BAGUA_HVD_ALLREDUCE")
    options.streams = read.integer("BAGUA_HVD_STREAMS", options.streams, 1, 8)
    options.negotiation = read.text("BAGUA_HVD_NEGOTIATION")
    options.negotiation_fanout = read.integer("BAGUA_HVD_NEGOTIATION_FANOUT", options.negotiation_fanout, 1, 1024)
    options.nccl_levels = _nccl_levels(read)
    options.host_id = read.text("BAGUA_HVD_HOST_ID")
    options.fusion_threshold = read.integer("HOROVOD_FUSION_THRESHOLD", options.fusion_threshold, 0, 2**63 - 1)
    options.cache_capacity = read.integer("HOROVOD_CACHE_CAPACITY", options.cache_capacity, 0)
    options.start_timeout_ms = start_timeout_ms(read.environ)
    options.timeout_ms = read.milliseconds("HOROVOD_GLOO_TIMEOUT_SECONDS", 30)
    options.heartbeat_timeout_ms = read.milliseconds("BAGUA_HVD_HEARTBEAT_TIMEOUT_SECONDS", 30, allow_zero=True)
    _read_stall_check(read, options)
    options.dynamic_process_sets = read.flag("HOROVOD_DYNAMIC_PROCESS_SETS")
    options.elastic = read.flag("HOROVOD_ELASTIC")
    options.timeline = read.text("HOROVOD_TIMELINE")
    options.timeline_mark_cycles = read.flag("HOROVOD_TIMELINE_MARK_CYCLES")
    if size > 1:
        _read_rendezvous(read, options)
    return options


def _nccl_levels(read):
    """Where NCCL stays within hosts: 2, wherever there are several; 1, in allreduces; 0, only where it must."""
    if read.choice("BAGUA_HVD_NCCL", "1", ("0", "1", "local")) == "local":
        return 2
    return int(read.flag("HOROVOD_HIERARCHICAL_ALLREDUCE"))


def start_timeout_ms(environ):
    """HOROVOD_START_TIMEOUT of a mapping. ValueError: malformed."""
    return _Reader(environ).milliseconds("HOROVOD_START_TIMEOUT", 30)


def _read_stall_check(read, options):
    options.stall_warning_ms = read.milliseconds("HOROVOD_STALL_CHECK_TIME_SECONDS", 60, allow_zero=True)
    options.stall_shutdown_ms = read.milliseconds("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", 0, allow_zero=True)
    if 0 < options.stall_shutdown_ms < options.stall_warning_ms:
        warnings.warn(
            "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS is below HOROVOD_STALL_CHECK_TIME_SECONDS and therefore ignored",
            stacklevel=2,
        )
        options.stall_shutdown_ms = 0
    if read.flag("HOROVOD_STALL_CHECK_DISABLE"):
        options.stall_warning_ms = options.stall_shutdown_ms = 0


def _read_rendezvous(read, options):
    host = read.text("HOROVOD_GLOO_RENDEZVOUS_ADDR")
    if host is None or read.text("HOROVOD_GLOO_RENDEZVOUS_PORT") is None:
        raise ValueError(
            f"HOROVOD_SIZE={options.size}, but HOROVOD_GLOO_RENDEZVOUS_ADDR and HOROVOD_GLOO_RENDEZVOUS_PORT do not "
            f"say where the ranks meet: start the job with `baguarun -np {options.size} python <script>`."
        )
    options.rendezvous_port = read.integer("HOROVOD_GLOO_RENDEZVOUS_PORT", 0, 1, 65535)
    try:
        options.rendezvous_host = socket.gethostbyname(host)
    except OSError as error:
        raise ValueError(
            f"environment variable HOROVOD_GLOO_RENDEZVOUS_ADDR={host!r}: expected an IPv4 address or a name that "
            f"resolves to one ({error})"
        ) from None
    options.secret = read.secret("_HOROVOD_SECRET_KEY")
    if not options.secret:
        raise ValueError(
            "environment variable _HOROVOD_SECRET_KEY is missing: the ranks of a job prove themselves by it. "
            f"Start the job with `baguarun -np {options.size} python <script>`, which sets it."
        )
    options.listen_host = _listen_host(read, options)


def _listen_host(read, options):
    """The IPv4 address that other ranks can reach this one at."""
    interfaces = read.text("HOROVOD_GLOO_IFACE")
    if interfaces is None:
        return local_address_towards(options.rendezvous_host)
    import psutil

    addresses = {
        name: [a.address for a in found if a.family == socket.AF_INET] for name, found in psutil.net_if_addrs().items()
    }
    for interface in interfaces.split(","):
        if addresses.get(interface.strip()):
            return addresses[interface.strip()][0]
    known = ", ".join(sorted(name for name, found in addresses.items() if found))
    raise ValueError(f"environment variable HOROVOD_GLOO_IFACE={interfaces!r}: expected one of {known}")


def local_address_towards(host):
    """The local address that packets to `host` would carry. Sends nothing."""
    if ipaddress.ip_address(host).is_loopback:
        return "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))
            return probe.getsockname()[0]
        except OSError as error:
            raise ValueError(f"HOROVOD_GLOO_RENDEZVOUS_ADDR={host}: no route from this host ({error})") from None
