"""What is between the ranks: measured by a few allreduces; said in what the core's simulator takes.

The rate is that at which an allreduce between this many hosts (on one host: ranks) would take what was measured, so it
holds what copying and adding cost. Several ranks of a host share one line.
"""
import os
import statistics
from time import perf_counter_ns
from typing import NamedTuple

import numpy as np

from bagua_hvd.codecs import Codec
from bagua_hvd.collectives.facts import extremes
from bagua_hvd.core import native
from bagua_hvd.core.simulator import Network, allreduces
from bagua_hvd.job import basics
from bagua_hvd.job.process_sets import ProcessSet
from bagua_hvd.primitives import c_fp_s
from bagua_hvd.tuning.cost import Ranks

SIZES = 32 << 10, 256 << 10, 2 << 20        # bytes of the allreduces that the rate is known by
LONGEST_US = 250_000                        # of an allreduce of the next size, as far as is known
SMALL, LARGE = 5, 3                         # how often each
_SAMPLE = 1 << 16                           # elements that a codec encodes
_FASTEST = 1e12                             # bytes a second: what takes no time that could be seen
_SMALL_BYTES = 4


class Measured(NamedTuple):
    """Equal on all ranks: of the slowest.

    Attributes:
        ranks: how many, on how many hosts. small: us of an allreduce of 4 bytes. nbytes, large: of a large one, us.
        encode, decode: ps an element, by codec. spent: us that measuring took.
        crowded: whether on any host ranks' threads and engines' have to share the processors.
    """

    ranks: Ranks
    small: int
    nbytes: int
    large: int
    encode: tuple[int, ...]
    decode: tuple[int, ...]
    spent: int
    crowded: bool

    def network(self, seen: float = 0.0) -> Network:
        """For the simulator: hosts, each with one rank. seen: bytes a second that training has got through since."""
        n = self.ranks.ends
        one_way = max(allreduces(n, [_SMALL_BYTES], Network(1.0, _FASTEST)))     # how many hops that is
        latency = max(self.small, 1) * 1e-6 / one_way
        waiting = max(allreduces(n, [self.nbytes], Network(latency, _FASTEST)))
        seconds = max(self.large * 1e-6 - waiting, 0.1 * self.large * 1e-6, 1e-9)
        rate = on_the_line(self.nbytes, n) / seconds        # and packets' headers
        rate *= max(allreduces(n, [self.nbytes], Network(latency, rate))) / (waiting + seconds)
        return Network(latency, min(_FASTEST, max(rate, seen)))

    def words(self) -> str:
        """For people."""
        network = self.network()
        where = f"{self.ranks.hosts} hosts" if self.ranks.hosts > 1 else f"{self.ranks.ranks} ranks of one host"
        return f"{where}, {network.bytes_per_s * 8e-6:.0f} Mbit/s, {network.latency_s * 1e3:.2f} ms"


def on_the_line(nbytes: int, n: int) -> float:
    """Bytes that an allreduce of so many sends over each of n lines."""
    return 2 * (n - 1) / n * nbytes


def longer(small: int, nbytes: int, large: int, size: int) -> int:
    """us that an allreduce of `size` bytes would take, where one of `nbytes` takes `large` and a tiny one `small`."""
    return small + max(0, large - small) * size // nbytes


def _timed(values: np.ndarray, name: str, group: ProcessSet, times: int) -> int:
    """Median us of an allreduce, after a first one; of the slowest rank."""
    taken = []
    for _ in range(times + 1):
        began = perf_counter_ns()
        c_fp_s(values, group, average=False, name=name).wait()
        taken.append(perf_counter_ns() - began)
    return _agreed([round(statistics.median(taken[1:]) / 1000)], name, group)[0]


def _agreed(numbers: list[int], name: str, group: ProcessSet) -> list[int]:
    largest = [largest for largest, _ in extremes(numbers, f"{name}.agreed", group)]
    return [max(1, number) for number in largest]


def _codec_ps(codec: Codec) -> tuple[int, int]:
    values = np.random.default_rng(0).standard_normal(_SAMPLE).astype(np.float32)
    encoding, decoding = [], []
    for _ in range(3):
        began = perf_counter_ns()
        code = codec.encode(values)
        between = perf_counter_ns()
        codec.decode(code, values.dtype, _SAMPLE)
        encoding.append(between - began)
        decoding.append(perf_counter_ns() - between)
    return min(encoding) * 1000 // _SAMPLE, min(decoding) * 1000 // _SAMPLE


def measure(name: str, group: ProcessSet, codecs: list[Codec]) -> Measured:
    """Collective; blocks for a second at most, on a line of which 32 KiB take no longer than 100 ms.

    Args:
        name: of the operations. codecs: alike on all ranks; each takes float32.
    Raises:
        HorovodInternalError: a rank was lost.
    """
    began = perf_counter_ns()
    small = _timed(np.ones(_SMALL_BYTES // native.dtype_size(native.FLOAT32), np.float32), f"{name}.small", group,
                   SMALL)
    nbytes = large = 0
    for size in SIZES:
        if large and longer(small, nbytes, large, size) > LONGEST_US:
            break
        nbytes, large = size, _timed(np.ones(size // 4, np.float32), f"{name}.large", group, LARGE)
    codes = [_codec_ps(codec) for codec in codecs]
    spent = (perf_counter_ns() - began) // 1000
    hosts = min(basics.cross_size(), group.size())
    crowded = 2 * basics.local_size() > len(os.sched_getaffinity(0))
    numbers = _agreed([spent, hosts, 1 + crowded, *(ps[0] for ps in codes), *(ps[1] for ps in codes)], name, group)
    speeds = numbers[3:]
    return Measured(Ranks(group.size(), numbers[1]), small, nbytes, large, tuple(speeds[:len(codecs)]),
                    tuple(speeds[len(codecs):]), numbers[0], numbers[2] > 1)
