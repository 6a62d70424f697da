"""What some steps were like on one rank, as integers; on all ranks the largest of them counts."""
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from bagua_hvd.training.timing import StepTimes

POINTS = 16
_LONGEST_US = 2**31 - 2


class Window(NamedTuple):
    """Medians over steps; us.

    Attributes:
        step: from one step's end to the next one's. computing: less what training waited for communication.
        backward: from a step's end until the last gradient is there.
        ready: until 1/16, 2/16, ... of the bytes are, in the order of the buckets.
    """

    step: int
    computing: int
    backward: int
    ready: tuple[int, ...]

    def as_list(self) -> list[int]:
        """For of_list()."""
        return [self.step, self.computing, self.backward, *self.ready]

    @classmethod
    def of_list(cls, numbers: Sequence[int]) -> "Window":
        """What as_list() was made of."""
        step, computing, backward, *ready = numbers
        return cls(step, computing, backward, tuple(ready))

    def ready_at(self, part: float) -> int:
        """When this part of the bytes is ready, 0 < part <= 1."""
        return self.ready[min(POINTS - 1, max(0, -int(-part * POINTS // 1) - 1))]


def _us(nanoseconds: float) -> int:
    return max(0, min(_LONGEST_US, round(nanoseconds / 1000)))


def window(steps: Sequence[StepTimes], order: Sequence[int], nbytes: Sequence[int]) -> Window:
    """Of some steps, at least one.

    Args:
        order: gradients, as the buckets hold them. nbytes: of each of these.
    """
    backward = statistics.median(each.backward for each in steps)
    whole, done, latest, ready = sum(nbytes) or 1, 0, 0.0, [0] * POINTS
    for index, size in zip(order, nbytes, strict=True):
        # One that no pass has touched is there at the end.
        latest = max(latest, statistics.median(min(each.ready.get(index, each.backward), each.backward)
                                               for each in steps))
        first = done * POINTS // whole
        done += size
        for point in range(first, -(-done * POINTS // whole)):
            ready[min(point, POINTS - 1)] = _us(latest)
    return Window(_us(statistics.median(each.step for each in steps)),
                  _us(statistics.median(each.step - each.waited for each in steps)), _us(backward), tuple(ready))
