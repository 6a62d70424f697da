"""What the job has cost this rank so far: hvd.statistics(), and the same figures for Prometheus.

Counters of the core and of the optimizers, summed since init(). Nothing is measured for this that is not counted
anyway, so looking at it costs some microseconds and not looking at it costs nothing.
"""
import time
from dataclasses import asdict, dataclass, field, fields, replace

from bagua_hvd.core import variables
from bagua_hvd.job.runtime import context, job_options, runtime


@dataclass
class AlgorithmStatistics:
    """What the optimizers with one algorithm have done.

    Attributes:
        steps: optimizer steps. gradient_bytes: of the gradients given to the algorithm, before any encoding.
        exposed_ms: time that the training waited for communication instead of computing.
    """

    steps: int = 0
    gradient_bytes: int = 0
    exposed_ms: float = 0.0


@dataclass
class Period:
    """Sums of this rank over some time.

    Attributes:
        seconds: how long it was.
        operations: that have ended. executions: less, where operations were fused.
        bytes_sent, bytes_received: of tensors or their codes, to and from other ranks, over any transport.
        control_bytes_sent: of negotiation. cache_hits, cache_misses: of agreements known from before.
        blocked_ms: time that Python spent waiting for operations.
        algorithms: by the name of the algorithm's class.
    """

    seconds: float = 0.0
    operations: int = 0
    executions: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    control_bytes_sent: int = 0
    cache_hits: int = 0
    cache_misses: int = 0
    blocked_ms: float = 0.0
    algorithms: dict[str, AlgorithmStatistics] = field(default_factory=dict)

    @property
    def steps(self) -> int:
        """Steps of all optimizers."""
        return sum(algorithm.steps for algorithm in self.algorithms.values())

    @property
    def exposed_ms(self) -> float:
        """Time that training waited for communication, over all optimizers."""
        return sum(algorithm.exposed_ms for algorithm in self.algorithms.values())

    def flat(self, prefix: str = "bagua_hvd/") -> dict[str, float]:
        """All figures by name, those of an algorithm as `prefix + "ByteGrad/exposed_ms"`; for a logger of scalars."""
        figures = {prefix + name: value for name, value in asdict(self).items() if name != "algorithms"}
        for name, algorithm in self.algorithms.items():
            figures.update({f"{prefix}{name}/{figure}": value for figure, value in asdict(algorithm).items()})
        return figures


@dataclass
class Statistics:
    """total: since init(). recent: since the last call of statistics(), or since init()."""

    total: Period
    recent: Period


def _minus(later, earlier):
    """The difference of two records of one class, figure by figure."""
    return type(later)(**{
        f.name: getattr(later, f.name) - getattr(earlier, f.name) for f in fields(later) if f.name != "algorithms"
    })


def _since(total, last):
    recent = _minus(total, last)
    recent.algorithms = {name: _minus(algorithm, last.algorithms.get(name, AlgorithmStatistics()))
                         for name, algorithm in total.algorithms.items()}
    return recent


def _algorithms():
    # Of a copy: a reporter's or a scraper's thread reads while the training may meet another algorithm.
    return {name: replace(record) for name, record in runtime.algorithms.copy().items()}


def total() -> Period:
    """The sums since init(). HorovodInternalError before it."""
    counters = context().counters()
    return Period(
        time.monotonic() - runtime.started, counters.operations, counters.executions, counters.payload_bytes_sent,
        counters.payload_bytes_received, counters.control_bytes_sent, counters.cache_hits, counters.cache_misses,
        counters.blocked_ns / 1e6, _algorithms(),
    )


def statistics() -> Statistics:
    """What communication has cost this rank: operations, bytes, waiting; in total, and since the last call.

        recent = hvd.statistics().recent
        print(f"{recent.bytes_sent / recent.steps} bytes and {recent.exposed_ms / recent.steps} ms exposed a step")

    Raises:
        ValueError: before init().
    """
    job_options()
    now = total()
    recent = _since(now, runtime.last_statistics or Period())
    runtime.last_statistics = now
    return Statistics(now, recent)


def record(algorithm_name: str) -> AlgorithmStatistics:
    """Where optimizers with this algorithm count, from the last init() on."""
    return runtime.algorithms.setdefault(algorithm_name, AlgorithmStatistics())


class _Collector:
    """Prometheus' side: every scrape reads the counters anew."""

    def collect(self):
        from prometheus_client.core import CounterMetricFamily

        if runtime.context is None:
            return
        now = total()
        for name, value in now.flat(prefix="").items():
            if "/" not in name:
                yield CounterMetricFamily(f"bagua_hvd_{name}", f"hvd.statistics().total.{name} of rank 0", value)
        for figure in fields(AlgorithmStatistics):
            family = CounterMetricFamily(f"bagua_hvd_algorithm_{figure.name}", f"{figure.name}, by algorithm",
                                         labels=["algorithm"])
            for name, algorithm in now.algorithms.items():
                family.add_metric([name], getattr(algorithm, figure.name))
            yield family


def serve_metrics() -> None:
    """On rank 0, with BAGUA_HVD_METRICS_PORT set: serves the totals to Prometheus, until the process ends.

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
        raise ValueError(f"BAGUA_HVD_METRICS_PORT={port}: {host}:{port} cannot be listened on ({error}); "
                         "give another port") from error
