"""Times of some steps on one rank, as integers; the largest of all ranks counts."""
import statistics
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from bagua_hvd.training.model import StepTimes

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
