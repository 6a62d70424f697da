"""What is between the ranks: measured by a few allreduces; said in what the core's simulator takes.

The rate is that by which the largest allreduce takes longer than the next one, so it holds what copying and adding
cost, and not how often ranks wait for each other: repeated at once, an allreduce takes a hop less on some paths, for
who ends first has asked for the next already. Several ranks of a host share one line.
"""
import os
import statistics
from collections.abc import Sequence
from functools import lru_cache
from time import perf_counter_ns
from typing import NamedTuple

import numpy as np

from bagua_hvd.collectives.facts import extremes
from bagua_hvd.collectives.rules import registered_id
from bagua_hvd.core import native
from bagua_hvd.core.simulator import Network, allreduces
from bagua_hvd.job import basics
from bagua_hvd.job.process_sets import ProcessSet
from bagua_hvd.primitives import c_fp_s
from bagua_hvd.tuning.cost import Ranks
from bagua_hvd.tuning.memory import UNKNOWN_MIB, available_mib

SIZES = 32 << 10, 256 << 10, 2 << 20, 8 << 20       # bytes of the allreduces that the rate is known by
MOST_US = 1_500_000                         # of all allreduces: no larger size, if it would take more
SMALL, LARGE = 4, 2                         # how often each
NOISE = 0.02                                # of what the largest one took: no difference between two is known better
_FASTEST = 1e12                             # bytes a second: what takes no time that could be seen
_NEARER, _FARTHEST = 4, 4.0                 # times that a rate is improved on, and how far that may lead
_SMALL_BYTES = 4


class Measured(NamedTuple):
    """Equal on all ranks: of the slowest.

    Attributes:
        ranks: how many, on how many hosts. small: us of an allreduce of 4 bytes. nbytes, large: of a large one, us.
        encode, decode: ps an element, by codec. spent: us that measuring took.
        crowded: whether on any host ranks' threads and engines' have to share the processors.
        less, lesser: of the next smaller one, us; 0: there is that of 4 bytes only.
        free_mib: memory that each rank could still have, where there is least.
    """

    ranks: Ranks
    small: int
    nbytes: int
    large: int
    encode: tuple[int, ...]
    decode: tuple[int, ...]
    spent: int
    crowded: bool
    less: int = 0
    lesser: int = 0
    free_mib: int = UNKNOWN_MIB

    def network(self, seen: float = 0.0) -> Network:
        """For the simulator: hosts, each with one rank. seen: bytes a second that training has got through since."""
        n = self.ranks.ends
        less, lesser = (self.less, self.lesser) if self.less else (_SMALL_BYTES, self.small)
        latency = max(self.small, 1) * 1e-6 / waits(n, _SMALL_BYTES)
        seconds = (self.large - lesser) * 1e-6 - latency * (waits(n, self.nbytes) - waits(n, less))
        seconds = max(seconds, NOISE * self.large * 1e-6, 1e-9)
        first = rate = on_the_line(self.nbytes - less, n) / seconds
        for _ in range(_NEARER):            # by the schedules for these sizes on such a line, and with packets' headers
            took = [max(allreduces(n, [nbytes], Network(latency, rate))) - latency * waits(n, nbytes)
                    for nbytes in (self.nbytes, less)]
            rate = min(first * _FARTHEST, max(first / _FARTHEST, rate * (took[0] - took[1]) / seconds))
        return Network(latency, min(_FASTEST, max(rate, seen)))

    def words(self, seen: float = 0.0) -> str:
        """For people."""
        known, used = self.network(), self.network(seen)
        where = f"{self.ranks.hosts} hosts" if self.ranks.hosts > 1 else f"{self.ranks.ranks} ranks of one host"
        why = f" as training has sent ({known.bytes_per_s * 8e-6:.0f} when measured)" if used != known else ""
        return f"{where}, {used.bytes_per_s * 8e-6:.0f} Mbit/s{why}, {used.latency_s * 1e3:.2f} ms"


@lru_cache(maxsize=512)
def waits(n: int, nbytes: int) -> float:
    """Hops that ranks wait for in an allreduce between so many hosts, where bytes take no time."""
    return max(allreduces(n, [nbytes], Network(1.0, _FASTEST)))


def on_the_line(nbytes: int, n: int) -> float:
    """Bytes that an allreduce of so many sends over each of n lines."""
    return 2 * (n - 1) / n * nbytes


def longer(less: int, lesser: int, nbytes: int, large: int, size: int) -> int:
    """us of an allreduce of `size` bytes, where one of `nbytes` takes `large`, and one of `less` `lesser`."""
    return large + max(0, large - lesser) * (size - nbytes) // (nbytes - less)


def _timed(values: np.ndarray, name: str, group: ProcessSet, times: int) -> tuple[int, int]:
    """us of an allreduce, the median after a first one, and of all; of the slowest rank."""
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
    """Collective; blocks for two seconds at most, on a line of which 32 KiB take no longer than 100 ms.

    Args:
        name: of the operations. speeds: of codecs that are alike on all ranks, as Speeds has them.
    Raises:
        HorovodInternalError: a rank was lost.
    """
    began = perf_counter_ns()
    ranks = Ranks(group.size(), basics.context().process_set_hosts(registered_id(group)))
    small, taken = _timed(np.ones(_SMALL_BYTES // native.dtype_size(native.FLOAT32), np.float32), f"{name}.small",
                          group, SMALL)
    less, lesser = nbytes, large = 0, 0
    for size in SIZES:
        if large:
            # How often the first size waits more than 4 bytes do says nothing of larger ones.
            hops = small * waits(ranks.ends, nbytes) / waits(ranks.ends, _SMALL_BYTES)
            known = (less, lesser) if less else (0, round(hops))
            expected = longer(*known, nbytes, large, size)
            if taken + (LARGE + 1) * expected > MOST_US:
                break
        less, lesser = nbytes, large
        nbytes = size
        large, whole = _timed(np.ones(size // 4, np.float32), f"{name}.large", group, LARGE)
        taken += whole
    spent = (perf_counter_ns() - began) // 1000
    crowded = 2 * basics.local_size() > len(os.sched_getaffinity(0))
    used = UNKNOWN_MIB - available_mib() // basics.local_size()         # the largest counts
    numbers = _agreed([spent, 1 + crowded, used, *(ps for ps, _ in speeds), *(ps for _, ps in speeds)], name, group)
    spent, crowds, used, *ps = numbers
    return Measured(ranks, small, nbytes, large, tuple(ps[:len(speeds)]), tuple(ps[len(speeds):]), spent, crowds > 1,
                    less, lesser, UNKNOWN_MIB - used)
