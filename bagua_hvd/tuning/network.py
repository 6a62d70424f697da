"""The network between the ranks: measured by a few allreduces, described by the parameters of the core's simulator.
With it are measured the speeds of codecs, and the available memory.

The rate follows from the difference in time between the largest allreduce and the next one. So it includes copying and
adding, but not how often ranks wait for each other: an allreduce that is repeated at once takes a hop less on some
paths, since the first rank to end has already requested the next one. The ranks of a host share one link.
"""
import os
import statistics
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from time import perf_counter_ns
from typing import NamedTuple

import numpy as np

from bagua_hvd.codecs import Codec
from bagua_hvd.collectives.objects import extremes
from bagua_hvd.core import native
from bagua_hvd.core.context import Network
from bagua_hvd.job import basics
from bagua_hvd.job.process_sets import ProcessSet, registered_id
from bagua_hvd.primitives import c_fp_s
from bagua_hvd.tuning.cost import Ranks

SIZES = 32 << 10, 256 << 10, 2 << 20, 8 << 20       # bytes of the allreduces that determine the rate
MOST_US = 1_500_000                         # limit of all allreduces: skips a larger size that would exceed it
SMALL, LARGE = 4, 2                         # repetitions of each
NOISE = 0.02                                # of the largest one's time: precision of a difference
_FASTEST = 1e12                             # bytes a second: the rate of a time too short to measure
_NEARER, _FARTHEST = 4, 4.0                 # iterations that refine a rate, and their largest factor
_SMALL_BYTES = 4
_SAMPLE = 1 << 16                           # elements that a codec's speed is measured with
_TIMES = 5                                  # measurements of it, of which the median counts
UNKNOWN_MIB = 2**31 - 2
_MEMINFO, _LIMIT, _USED = (Path(path) for path in (
    "/proc/meminfo", "/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"))


def allreduces(hosts: int, nbytes: Sequence[int], network: Network) -> list[float]:
    """Predicts the time in seconds at which each host finishes float32 allreduces of `nbytes` bytes, posted together.

    Each host has one rank and one line. The core simulates all ranks' schedules (native/simulation). Times include
    negotiation, in one message.

    Raises:
        ValueError: a value out of range. HorovodInternalError: more steps than the simulator takes (a ring of more
            than 1,000 hosts), or no memory.
    """
    seconds = native.ffi.new("double[]", hosts)
    posted = native.ffi.new("struct bhvd_simulated[]", [
        {"kind": native.ALLREDUCE, "dtype": native.FLOAT32, "nbytes": each} for each in nbytes])
    lines = native.ffi.new("struct bhvd_network *", {**network._asdict(), "slow_rank": -1})
    native.call(native.lib.bhvd_simulate, hosts, native.ffi.NULL, posted, len(nbytes), True, lines, seconds)
    return list(seconds)


class Measured(NamedTuple):
    """Measurements of the slowest rank, equal on all ranks.

    Attributes:
        ranks: numbers of ranks and hosts. small: us of a 4-byte allreduce. nbytes, large: of a large one, and its us.
        encode, decode: ps per element, by codec. spent: us that measuring took.
        oversubscribed: whether on any host the threads of ranks and engines share processors.
        next_nbytes, next_us: bytes of the next smaller one, and its us; 0: there is only that of 4 bytes.
        free_mib: available memory for each rank, on the host with the least.
    """

    ranks: Ranks
    small: int
    nbytes: int
    large: int
    encode: tuple[int, ...]
    decode: tuple[int, ...]
    spent: int
    oversubscribed: bool
    next_nbytes: int = 0
    next_us: int = 0
    free_mib: int = UNKNOWN_MIB

    def network(self, seen: float = 0.0) -> Network:
        """For the simulator: hosts, each with one rank. seen: bytes a second that training has reached since."""
        n = self.ranks.ends
        next_nbytes, next_us = (self.next_nbytes, self.next_us) if self.next_nbytes else (_SMALL_BYTES, self.small)
        latency = max(self.small, 1) * 1e-6 / critical_hops(n, _SMALL_BYTES)
        hops = critical_hops(n, self.nbytes) - critical_hops(n, next_nbytes)
        seconds = (self.large - next_us) * 1e-6 - latency * hops
        seconds = max(seconds, NOISE * self.large * 1e-6, 1e-9)
        first = rate = line_bytes(self.nbytes - next_nbytes, n) / seconds
        for _ in range(_NEARER):            # by the schedules for these sizes on such a link, with packet headers
            took = [allreduce_seconds(n, nbytes, Network(latency, rate)) - latency * critical_hops(n, nbytes)
                    for nbytes in (self.nbytes, next_nbytes)]
            rate = min(first * _FARTHEST, max(first / _FARTHEST, rate * (took[0] - took[1]) / seconds))
        return Network(latency, min(_FASTEST, max(rate, seen)))

    def describe(self, seen: float = 0.0) -> str:
        """A description for messages."""
        known, used = self.network(), self.network(seen)
        where = f"{self.ranks.hosts} hosts" if self.ranks.hosts > 1 else f"{self.ranks.ranks} ranks of one host"
        why = f" as training has sent ({known.bytes_per_s * 8e-6:.0f} when measured)" if used != known else ""
        return f"{where}, {used.bytes_per_s * 8e-6:.0f} Mbit/s{why}, {used.latency_s * 1e3:.2f} ms"


@lru_cache(maxsize=512)
def allreduce_seconds(n: int, nbytes: int, network: Network) -> float:
    """The time at which the last of n hosts finishes an allreduce; see allreduces()."""
    return max(allreduces(n, [nbytes], network))


def critical_hops(n: int, nbytes: int) -> float:
    """Hops that ranks wait for in an allreduce between n hosts, if bytes take no time."""
    return allreduce_seconds(n, nbytes, Network(1.0, _FASTEST))


def line_bytes(nbytes: int, n: int) -> float:
    """Bytes that an allreduce of `nbytes` sends over each of n links."""
    return 2 * (n - 1) / n * nbytes


def extrapolated_us(next_nbytes: int, next_us: int, nbytes: int, large: int, size: int) -> int:
    """us of an allreduce of `size` bytes, where one of `nbytes` takes `large`, and one of `next_nbytes` `next_us`."""
    return large + max(0, large - next_us) * (size - nbytes) // (nbytes - next_nbytes)


def _timed(values: np.ndarray, name: str, group: ProcessSet, times: int) -> tuple[int, int]:
    """(median us of an allreduce after a first one, us of all of them), of the slowest rank."""
    taken = []
    for _ in range(times + 1):
        began = perf_counter_ns()
        c_fp_s(values, group, average=False, name=name).wait()
        taken.append(perf_counter_ns() - began)
    median, whole = _agreed([round(statistics.median(taken[1:]) / 1000), sum(taken) // 1000], name, group)
    return median, whole


def _agreed(numbers: list[int], name: str, group: ProcessSet) -> list[int]:
    largest = [largest for largest, _ in extremes(numbers, f"{name}.agreed", group)]
    return [max(1, number) for number in largest]


def measure(name: str, group: ProcessSet, speeds: Sequence[tuple[int, int]]) -> Measured:
    """Measures the network. Collective; blocks for two seconds at most if 32 KiB take no longer than 100 ms.

    Args:
        name: of the operations. speeds: of speeds(), for the same codecs on all ranks.
    Raises:
        HorovodInternalError: a rank was lost.
    """
    began = perf_counter_ns()
    ranks = Ranks(group.size(), basics.context().process_set_hosts(registered_id(group)))
    small, taken = _timed(np.ones(_SMALL_BYTES // native.dtype_size(native.FLOAT32), np.float32), f"{name}.small",
                          group, SMALL)
    points = [(0, 0)]           # (bytes, us)
    for size in SIZES:
        if len(points) > 1:
            # The extra waits of the first size over 4 bytes must not be extrapolated to larger sizes.
            hops = small * critical_hops(ranks.ends, points[-1][0]) / critical_hops(ranks.ends, _SMALL_BYTES)
            known = points[-2] if len(points) > 2 else (0, round(hops))
            if taken + (LARGE + 1) * extrapolated_us(*known, *points[-1], size) > MOST_US:
                break
        large, whole = _timed(np.ones(size // 4, np.float32), f"{name}.large", group, LARGE)
        points.append((size, large))
        taken += whole
    spent = (perf_counter_ns() - began) // 1000
    oversubscribed = 2 * basics.local_size() > len(os.sched_getaffinity(0))
    used = UNKNOWN_MIB - available_mib() // basics.local_size()         # the largest counts
    numbers = _agreed([spent, 1 + oversubscribed, used, *(ps for ps, _ in speeds), *(ps for _, ps in speeds)],
                      name, group)
    spent, crowds, used, *ps = numbers
    return Measured(ranks, small, *points[-1], tuple(ps[:len(speeds)]), tuple(ps[len(speeds):]), spent, crowds > 1,
                    *points[-2], UNKNOWN_MIB - used)


def _ps(codec: Codec) -> tuple[int, int]:
    values = np.random.default_rng(0).standard_normal(_SAMPLE).astype(np.float32)
    encoding, decoding = [], []
    for _ in range(_TIMES):
        began = perf_counter_ns()
        code = codec.encode(values)
        between = perf_counter_ns()
        codec.decode(code, values.dtype, _SAMPLE)
        encoding.append(between - began)
        decoding.append(perf_counter_ns() - between)
    return tuple(round(statistics.median(taken) * 1000 / _SAMPLE) for taken in (encoding, decoding))  # type: ignore


def speeds(codecs: Sequence[Codec]) -> Future[list[tuple[int, int]]]:
    """For each codec, (ps to encode an element, ps to decode one), in float32; a thread measures, as in training."""
    pool = ThreadPoolExecutor(1, "codecs' speeds")
    found = pool.submit(lambda: [_ps(codec) for codec in codecs])
    pool.shutdown(wait=False)
    return found


def available_mib() -> int:
    """MiB that are available without swapping, according to the kernel, and within the container's limit."""
    found = [UNKNOWN_MIB]
    with suppress(OSError, KeyError, ValueError):
        lines = dict(line.split(":", 1) for line in _MEMINFO.read_text().splitlines())
        found.append(int(lines["MemAvailable"].split()[0]) >> 10)
    with suppress(OSError, ValueError):         # no container, or one without a limit: "max"
        found.append(max(0, int(_LIMIT.read_text()) - int(_USED.read_text())) >> 20)
    return min(found)
