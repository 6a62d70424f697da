"""The cost of communication for this rank: hvd.statistics(), and the same figures for Prometheus.

Counters of the core and of the optimizers, summed since init(). All of them are counted anyway: reading them takes some
microseconds, and not reading them costs nothing.
"""
import time
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from bagua_hvd.core import variables
from bagua_hvd.core.operations import BYTE_COUNTERS
from bagua_hvd.job.runtime import context, job_options, runtime


@dataclass
class AlgorithmStatistics:
    """Figures of the optimizers with one algorithm.

    Attributes:
        steps: optimizer steps. gradient_bytes: of the gradients given to the algorithm, before any encoding.
        exposed_ms: time that the training waited for communication instead of computing.
        bytes_sent, shm_bytes_sent, tcp_bytes_sent, mpi_bytes_sent: as in Period, for this algorithm's communication;
            0 for all but the first 63 algorithms.
    """

    steps: int = 0
    gradient_bytes: int = 0
    exposed_ms: float = 0.0
    bytes_sent: int = 0
    shm_bytes_sent: int = 0
    tcp_bytes_sent: int = 0
    mpi_bytes_sent: int = 0


@dataclass
class WaitedFor:
    """How long the job has waited for one rank.

    Attributes:
        operations: those that it was the last to request. waited_ms: total time since the last rank but one; counted
            while the stall check is on. A slow rank has both; a rank that is last only by chance has the first.
    """

    operations: int = 0
    waited_ms: float = 0.0


@dataclass
class Period:
    """Sums of this rank over some time.

    Attributes:
        seconds: length of the period.
        operations: ended operations. executions: fewer, if operations were fused.
        bytes_sent, bytes_received: of tensors or their codes, to and from other ranks, over any transport but NCCL.
        shm_bytes_sent, tcp_bytes_sent, mpi_bytes_sent: bytes_sent by transport. Shared memory counts the bytes that
            each other rank reads.
        nccl_bytes: of the tensors passed to NCCL; the bytes it sends for them are unknown.
        control_bytes_sent: of negotiation. cache_hits, cache_misses: of the cache of earlier negotiations.
        blocked_ms: time that Python spent waiting for operations.
        algorithms: by the name of the algorithm's class.
        waited_for: by rank; only on rank 0, which alone knows, and only for ranks that were the last at least
            once.
    """

    seconds: float = 0.0
    operations: int = 0
    executions: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    shm_bytes_sent: int = 0
    tcp_bytes_sent: int = 0
    mpi_bytes_sent: int = 0
    nccl_bytes: int = 0
    control_bytes_sent: int = 0
    cache_hits: int = 0
    cache_misses: int = 0
    blocked_ms: float = 0.0
    algorithms: dict[str, AlgorithmStatistics] = field(default_factory=dict)
    waited_for: dict[int, WaitedFor] = field(default_factory=dict)

    @property
    def steps(self) -> int:
        """Steps of all optimizers in total."""
        return sum(algorithm.steps for algorithm in self.algorithms.values())

    @property
    def exposed_ms(self) -> float:
        """Time that training waited for communication, over all optimizers."""
        return sum(algorithm.exposed_ms for algorithm in self.algorithms.values())

    def as_dict(self, prefix: str = "bagua_hvd/") -> dict[str, float]:
        """All figures by name, for a logger of scalars: TensorBoard's add_scalar, Keras' logs, Lightning's log_dict.

        Figures of an algorithm are named `prefix + "algorithms/ByteGrad/exposed_ms"`, those of a rank
        `prefix + "waited_for/3/waited_ms"`.
        """
        figures = {f"{prefix}{name}": value for name, value in _scalars(self)}
        for name in _LABELS:
            for key, record in getattr(self, name).items():
                figures.update({f"{prefix}{name}/{key}/{figure}": value for figure, value in asdict(record).items()})
        return figures


_REPORTED_RANKS = 8
# Fields with several records, and Prometheus' label for their keys.
_LABELS: dict[str, str] = {"algorithms": "algorithm", "waited_for": "rank"}


def _scalars(record):
    """The pairs (name, value) of all other fields, and of exposed time and steps over all algorithms."""
    own = [(figure.name, getattr(record, figure.name)) for figure in fields(record) if figure.name not in _LABELS]
    return [*own, ("steps", record.steps), ("exposed_ms", record.exposed_ms)]


@dataclass
class Statistics:
    """total: since init(). recent: since the last call of statistics(), or since init().

    plans: for each optimizer with algorithm="auto", by its model's name: its choice, in ms per step, and the reason.
    """

    total: Period
    recent: Period
    plans: dict[str, dict[str, Any]] = field(default_factory=dict)


def _minus(later: Any, earlier: Any) -> Any:
    """The difference of two records of one class, figure by figure, or of two dicts of records."""
    if isinstance(later, dict):
        return {key: _minus(record, earlier.get(key, type(record)())) for key, record in later.items()}
    if not isinstance(later, (int, float)):
        return type(later)(*(_minus(getattr(later, f.name), getattr(earlier, f.name)) for f in fields(later)))
    return later - earlier


def _algorithms(current):
    # A copy: a reporter's or scraper's thread may read while training adds an algorithm.
    found = {}
    for number, (name, record) in enumerate(runtime.algorithms.copy().items(), 1):
        sent = current.sent(number)             # zeros beyond the last counter
        found[name] = replace(record, bytes_sent=sum(sent), shm_bytes_sent=sent.shm_bytes,
                              tcp_bytes_sent=sent.tcp_bytes, mpi_bytes_sent=sent.mpi_bytes)
    return found


def _waited_for(current):
    return {rank: WaitedFor(operations, waited_ns / 1e6)
            for rank, (operations, waited_ns) in enumerate(current.waited_for(runtime.options.size)) if operations}


def total() -> Period:
    """The sums since init(). HorovodInternalError before init()."""
    current = context()
    counters = current.counters()
    return Period(
        time.monotonic() - runtime.started, counters.operations, counters.executions, counters.payload_bytes_sent,
        counters.payload_bytes_received, counters.shm_bytes_sent, counters.tcp_bytes_sent, counters.mpi_bytes_sent,
        counters.nccl_bytes, counters.control_bytes_sent, counters.cache_hits, counters.cache_misses,
        counters.blocked_ns / 1e6, _algorithms(current), _waited_for(current),
    )


def figures() -> dict[str, float]:
    """The sums since init() for a report to the launcher, in a short line: only a few of the ranks waited for.

    Without figures by algorithm: the dashboard shows sums, and a line above a pipe's atomic size might be torn.
    """
    now = total()
    longest = sorted(now.waited_for.items(), key=lambda entry: -entry[1].waited_ms)
    now.waited_for = dict(longest[:_REPORTED_RANKS])
    return {name: value for name, value in now.as_dict(prefix="").items() if not name.startswith("algorithms/")}


def statistics() -> Statistics:
    """The cost of communication for this rank: operations, bytes, waiting; in total, and since the last call.

        recent = hvd.statistics().recent
        print(f"{recent.bytes_sent / recent.steps} bytes and {recent.exposed_ms / recent.steps} ms exposed a step")

    Raises:
        ValueError: before init().
    """
    job_options()
    now = total()
    recent = _minus(now, runtime.last_statistics or Period())
    runtime.last_statistics = now
    return Statistics(now, recent, {name: dict(plan) for name, plan in runtime.plans.items()})


class Account:
    """Counts for the optimizers with one algorithm.

    Attributes:
        record: the AlgorithmStatistics, in hvd.statistics() from the first renew() on.
        byte_counter: the counter of bytes sent. 0 for algorithms beyond the last one: their bytes are only in the sums.
    """

    def __init__(self, algorithm_name: str) -> None:
        self._name = algorithm_name
        self.record, self.byte_counter = AlgorithmStatistics(), 0

    def renew(self) -> None:
        """Counts in the running job from now on."""
        self.record = runtime.algorithms.setdefault(self._name, AlgorithmStatistics())
        number = list(runtime.algorithms).index(self._name) + 1
        self.byte_counter = number if number < BYTE_COUNTERS else 0


class _Collector:
    """Prometheus collector: every scrape reads the counters anew."""

    def collect(self):
        from prometheus_client.core import CounterMetricFamily

        if runtime.context is None:
            return
        now = total()
        for name, value in _scalars(now):
            yield CounterMetricFamily(f"bagua_hvd_{name}", f"hvd.statistics().total.{name} of rank 0", value)
        for (name, label), record in zip(_LABELS.items(), (AlgorithmStatistics, WaitedFor), strict=True):
            for figure in fields(record):
                family = CounterMetricFamily(f"bagua_hvd_{name.removesuffix('s')}_{figure.name}",
                                             f"{figure.name}, by {label}", labels=[label])
                for key, entry in getattr(now, name).items():
                    family.add_metric([str(key)], getattr(entry, figure.name))
                yield family


def serve_metrics() -> None:
    """On rank 0, if BAGUA_HVD_METRICS_PORT is set: serves the totals to Prometheus until the process ends.

    Raises:
        ValueError: prometheus_client is not installed, or the port is taken.
    """
    port = variables.read("BAGUA_HVD_METRICS_PORT")
    if port is None or runtime.options.rank != 0 or runtime.metrics_server is not None:
        return
    try:
        from prometheus_client import CollectorRegistry, start_http_server
    except ImportError:
        raise ValueError(f"BAGUA_HVD_METRICS_PORT={port} needs prometheus_client: run `pip install prometheus_client`, "
                         "or leave the variable out") from None
    registry = CollectorRegistry()
    registry.register(_Collector())
    host = variables.read("BAGUA_HVD_METRICS_HOST")
    try:
        runtime.metrics_server = start_http_server(port, host, registry)
    except OSError as error:
        raise ValueError(f"BAGUA_HVD_METRICS_PORT={port}: cannot listen on {host}:{port} ({error}): give another "
                         "port") from error
