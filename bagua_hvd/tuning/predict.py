"""Predicts the time of a step: its critical path, over buckets that share one link.

    ranks agree on a bucket when its last gradient is ready; the link takes buckets in that order, one by one
    a bucket is complete some latencies after it has left the link; until then, at most seven others are in flight
    the step ends when all buckets are complete, and the computation that follows is done

Results are equal on all ranks: the simulator and this file use integers, and only + - * / and comparisons of floats.
The times of some steps on one rank, as integers, are its Window; the largest of all ranks counts.
"""
import statistics
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from bagua_hvd.training.model import StepTimes
from bagua_hvd.tuning.cost import Cost
from bagua_hvd.tuning.network import Measured, allreduce_seconds, line_bytes

AT_ONCE = 8             # buckets that may be in flight (native/core/negotiation/coordinator.h)
AGREED_HOPS = 2
RATE_KNOWN_TO = 2.0     # factor by which a measured rate of a distant link may be wrong
_HALVINGS = 8           # of the interval up to it
POINTS = 48             # ready times that ranks agree on with one small message
_LONGEST_US = 2**31 - 2


class Window(NamedTuple):
    """Medians over steps, in us.

    Attributes:
        step: from one step's end to the next one's. computing: the same without waiting for communication.
        backward: from a step's end until the last gradient is ready.
        ready: until these shares of the bytes are ready, in bucket order. until: the shares, 0 < share <= 1, rising.
    """

    step: int
    computing: int
    backward: int
    ready: tuple[int, ...]
    until: tuple[float, ...]

    def ready_at(self, part: float) -> int:
        """When this share of the bytes is ready, 0 < part <= 1, or the next larger one that is known."""
        return self.ready[min(len(self.ready) - 1, bisect_left(self.until, part))]


def points(ends: Iterable[float]) -> list[float]:
    """Shares of the bytes at which to record readiness: at these ends of buckets (if too many, at some), and at 1."""
    known = sorted({*ends, 1.0})
    return [known[len(known) * (place + 1) // POINTS - 1] for place in range(POINTS)] if len(known) > POINTS else known


def _us(nanoseconds: float) -> int:
    return max(0, min(_LONGEST_US, round(nanoseconds / 1000)))


def window(steps: Sequence[StepTimes], order: Sequence[int], nbytes: Sequence[int], until: Sequence[float]) -> Window:
    """The Window of some steps, at least one.

    Args:
        order: gradients in the order of the buckets. nbytes: of each of them. until: shares of all bytes, rising.
    """
    backward = statistics.median(each.backward for each in steps)
    whole, done, latest, ready = sum(nbytes) or 1, 0, 0.0, []
    rest = deque(round(part * whole) for part in until)         # exact ends of buckets, which fractions may miss
    for index, size in zip(order, nbytes, strict=True):
        while rest and done >= rest[0]:
            ready.append(_us(latest))
            rest.popleft()
        # A gradient that no pass has touched is ready at the end.
        latest = max(latest, statistics.median(min(each.ready.get(index, each.backward), each.backward)
                                               for each in steps))
        done += size
    ready += [_us(latest)] * len(rest)
    return Window(_us(statistics.median(each.step for each in steps)),
                  _us(statistics.median(each.step - each.waited for each in steps)), _us(backward), tuple(ready),
                  tuple(until))


class Part(NamedTuple):
    """A bucket in a step. until: the share of all bytes in this bucket and those before it, 0 < until <= 1."""

    until: float
    cost: Cost


class Predictor:
    """Predicts the steps of one job.

    Args:
        codecs: in the order of Measured's.
        overlaps: whether communication overlaps the backward pass.
        seen: bytes a second that a rank has sent in training, which the link must be able to carry.
    """

    def __init__(self, measured: Measured, codecs: Sequence[object], overlaps: bool = True, seen: float = 0.0) -> None:
        self._ends = measured.ranks.ends
        self._network = measured.network(seen)
        self._ps = {codec: (measured.encode[place], measured.decode[place]) for place, codec in enumerate(codecs)}
        self._oversubscribed = measured.oversubscribed
        self._overlaps = overlaps

    def _on_line_and_after(self, cost: Cost) -> tuple[float, float, float]:
        """(seconds on the link, seconds from then until completion, the processor's part of the first)."""
        network, line, after, codes = self._network, 0.0, 0.0, 0.0
        if cost.allreduced:
            line = line_bytes(cost.allreduced, self._ends) / network.bytes_per_s
            whole = allreduce_seconds(self._ends, cost.allreduced, network)
            after = max(0.0, whole - line - AGREED_HOPS * network.latency_s)
        if cost.rounds:
            encode, decode = self._ps[cost.codec]
            codes = (cost.encoded * encode + cost.decoded * decode) * 1e-12
            line += cost.sent / network.bytes_per_s + codes
            after += cost.rounds * network.latency_s
        return line, after, codes

    def step_us(self, parts: Sequence[Part], window: Window) -> int:
        """us of a step that communicates these buckets, in the order in which they are ready."""
        return self._step_us(parts, [self._on_line_and_after(part.cost) for part in parts], window)

    def rate(self, parts: Sequence[Part], window: Window) -> float:
        """Bytes a second that the link carries, if a step with these buckets has taken window.step.

        The known rate; or, if it predicts a longer step, a higher one, up to RATE_KNOWN_TO times the known rate.
        """
        known = self._network.bytes_per_s
        times = [self._on_line_and_after(part.cost) for part in parts]
        low, high = 1.0, RATE_KNOWN_TO
        if self._step_us(parts, times, window) <= window.step:
            return known
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            quicker = [((line - codes) / middle + codes, after, codes) for line, after, codes in times]
            if self._step_us(parts, quicker, window) > window.step:
                low = middle
            else:
                high = middle
        return known * high

    def _step_us(self, parts: Sequence[Part], times: Sequence[tuple[float, float, float]], window: Window) -> int:
        free = computed = 0.0
        done = [0.0] * AT_ONCE          # when each of the last AT_ONCE, and all before it, were complete
        for part, (line, after, codes) in zip(parts, times, strict=True):
            ready = window.ready_at(part.until) if self._overlaps else window.backward
            agreed = ready * 1e-6 + computed + AGREED_HOPS * self._network.latency_s
            free = max(free, agreed, done[0]) + line
            done = [*done[1:], max(done[-1], free + after)]
            computed += codes if self._oversubscribed else 0.0  # the backward pass waits for it
        backward = window.backward * 1e-6 + computed
        return max(1, round((max(backward, done[-1]) - backward + computed) * 1e6) + window.computing)


def total_line_bytes(parts: Sequence[Part], ends: int) -> float:
    """Bytes that each link carries in a step."""
    return sum(line_bytes(part.cost.allreduced, ends) + part.cost.sent for part in parts)
