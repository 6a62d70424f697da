"""Timestamps of each step on this rank, recorded by the Reducer for tuning/."""
from time import perf_counter_ns
from typing import NamedTuple


class StepTimes(NamedTuple):
    """Times of one step, in ns since the end of the previous one.

    Attributes:
        step: its end. waited: how long training waited for communication. backward: when the first wait began, and so
            when the last gradient was ready. ready: by gradient, when it was ready.
    """

    step: int
    waited: int
    backward: int
    ready: dict[int, int]


class Timing:
    """Records the steps since the last take()."""

    def __init__(self) -> None:
        self._steps: list[StepTimes] = []
        self.restart()

    def restart(self) -> None:
        """Drops all records; a step begins now."""
        self._steps.clear()
        self._begins(perf_counter_ns())

    def _begins(self, now: int) -> None:
        self._began, self._waited, self._backward = now, 0, 0
        self._ready: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._steps)

    def ready(self, index: int) -> None:
        """Records that gradient `index` is ready; a later call replaces an earlier one."""
        self._ready[index] = perf_counter_ns() - self._began

    def waited(self, since: int) -> None:
        """Records that training has waited for gradients from `since` (perf_counter_ns()) until now."""
        self._backward = self._backward or since - self._began
        self._waited += perf_counter_ns() - since

    def stepped(self) -> None:
        """The weights have been updated."""
        now = perf_counter_ns()
        if self._backward:              # else no wait was recorded
            self._steps.append(StepTimes(now - self._began, self._waited, self._backward, self._ready))
        self._begins(now)

    def take(self) -> list[StepTimes]:
        """Returns the recorded steps, and forgets them."""
        steps, self._steps = self._steps, []
        return steps
