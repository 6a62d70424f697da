"""When things happened in each step on this rank, noted by the Reducer for who wants to know (tuning/)."""
from time import perf_counter_ns
from typing import NamedTuple


class StepTimes(NamedTuple):
    """Of one step, in ns since the one before had ended.

    Attributes:
        step: its end. waited: how long training waited for communication. backward: when it first did, and so when the
            last gradient was there. ready: by gradient, when it was.
    """

    step: int
    waited: int
    backward: int
    ready: dict[int, int]


class Timing:
    """Notes of the steps since the last take()."""

    def __init__(self) -> None:
        self._steps: list[StepTimes] = []
        self.restart()

    def restart(self) -> None:
        """Forgets all that was noted; a step begins now."""
        self._steps.clear()
        self._begins(perf_counter_ns())

    def _begins(self, now: int) -> None:
        self._began, self._waited, self._backward = now, 0, 0
        self._ready: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._steps)

    def ready(self, index: int) -> None:
        """Gradient `index` is there; again: it is only now."""
        self._ready[index] = perf_counter_ns() - self._began

    def waited(self, since: int) -> None:
        """Training has waited for gradients from `since` on, by perf_counter_ns(), until now."""
        self._backward = self._backward or since - self._began
        self._waited += perf_counter_ns() - since

    def stepped(self) -> None:
        """The weights have been updated."""
        now = perf_counter_ns()
        if self._backward:              # else it has waited for nothing that is known
            self._steps.append(StepTimes(now - self._began, self._waited, self._backward, self._ready))
        self._begins(now)

    def take(self) -> list[StepTimes]:
        """The steps, once."""
        steps, self._steps = self._steps, []
        return steps
