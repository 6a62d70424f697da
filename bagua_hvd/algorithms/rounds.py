"""The rounds of asynchronous averaging: when they begin, how long a step waits for them, and how they end.

A round of all ranks begins after a step, once the previous one has ended. Ranks match rounds by their number, so a slow
rank delays the next round, but no rank's training. Each round also counts the ranks that have called abort(): they
take part in rounds until all have.
"""
import time
from collections.abc import Callable

import numpy as np

from bagua_hvd.algorithms.averaging import Mean
from bagua_hvd.core.operations import Posted
from bagua_hvd.primitives import c_fp_s
from bagua_hvd.training.model import Model

STEPS = 4
LOOKS = 20          # polls in a wait


class Patience:
    """How long a step waits for a round in flight if max_staleness is not set.

    Old averages cost accuracy, and waiting costs time. From a round's fourth step on, each step waits for it, but no
    longer than the step itself has taken. So a late rank costs the others at most half of their speed, and no rank
    waits forever for one that has made its last step. A step is the time between two calls of wait_for().
    """

    def __init__(self) -> None:
        self._went_on_at = time.monotonic()

    def wait_for(self, done: Callable[[], bool], steps: int) -> None:
        """Waits for a round that has been in flight for `steps` steps."""
        now = time.monotonic()
        step = now - self._went_on_at
        while steps >= STEPS and not done() and time.monotonic() < now + step:
            time.sleep(step / LOOKS)
        self._went_on_at = time.monotonic()


class Rounds:
    """The rounds of one model, within one init().

    Args:
        interval_s: seconds from the end of a round to the start of the next. max_staleness: see Async.
    Attributes:
        running: whether advance() begins new rounds. stopped: whether all ranks have called abort().
        over: whether a rank has left the job: then there are no more rounds. The buffers of the last one are kept,
            since it may still be in flight.
    """

    def __init__(self, model: Model, interval_s: float, max_staleness: int | None) -> None:
        self.running, self.stopped, self.over = True, False, False
        self._model = model
        self._interval_s, self._max_staleness = interval_s, max_staleness
        self._means: list[Mean] = []
        self._stopping: tuple[np.ndarray, Posted] | None = None      # in a round: numbers of aborted and of all ranks
        self._patience = Patience()
        self._ended_at = time.monotonic()
        self._began_in = 0

    def begin(self) -> None:
        group, name = self._model.group, self._model.name
        for bucket in self._model.weights:
            self._means.append(Mean(bucket, group))
        counts = np.array([not self.running, 1], np.float32)        # a rank in join() counts as none
        self._stopping = counts, c_fp_s(counts, group, average=False, name=f"{name}.stopping")
        self._began_in = self._model.step

    def _done(self) -> bool:
        return (self._stopping is not None and all(mean.operation.done() for mean in self._means)
                and self._stopping[1].done())

    def end(self) -> None:
        """Waits for the round in flight and adds its result."""
        assert self._stopping is not None
        for bucket, mean in zip(self._model.weights, self._means, strict=False):
            bucket.add(mean.difference())
        counts, operation = self._stopping
        operation.wait()
        self.stopped = bool(counts[0] == counts[1])
        self._means, self._stopping = [], None
        self._ended_at = time.monotonic()

    def advance(self) -> None:
        """After a step: ends a round that is done or too old, and begins one that is due."""
        if self.over:
            return
        age = self._model.step - self._began_in if self._stopping else 0
        if self._max_staleness is None:
            self._patience.wait_for(self._done, age)
        if self._stopping and (self._done() or (self._max_staleness is not None and age >= self._max_staleness)):
            self.end()
        if not self._stopping and self.running and time.monotonic() - self._ended_at >= self._interval_s:
            self.begin()

    def stop(self) -> None:
        """Takes part in rounds until all ranks have called this, so that none waits for a stopped one. Collective."""
        if self.over:
            return
        self.running = False
        if self._stopping:
            self.end()
        while not self.stopped:
            self.begin()
            self.end()

    def resume(self) -> None:
        """See Async.resume()."""
        self.running, self.stopped = True, False
