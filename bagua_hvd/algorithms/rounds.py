"""The rounds of asynchronous averaging: when they begin, how long a step waits for them, and how they end.

A round of all ranks begins after a step, once the previous one has ended. Ranks match rounds by their number, so a slow
rank delays the next round, but no rank's training. Each round also counts the ranks that have called abort(): they
take part in rounds until all have. For pairwise rounds see pair_rounds.py.
"""
import time
from collections.abc import Callable

import numpy as np

from bagua_hvd.algorithms.exchange import Exchange
from bagua_hvd.core.operations import Posted
from bagua_hvd.job.process_sets import ProcessSet
from bagua_hvd.primitives import c_fp_s
from bagua_hvd.training.buckets import Bucket
from bagua_hvd.training.model import Model
from bagua_hvd.training.state import State

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


class AnyRounds:
    """Base class of the rounds of a model: Rounds, PairRounds. By itself it has none.

    Attributes:
        running: whether advance() begins new rounds. stopped: whether all ranks have called abort().
    """

    running, stopped = True, False

    def advance(self) -> None:
        """Called after each step."""

    def stop(self) -> None:
        """See Async.abort()."""

    def resume(self) -> None:
        """See Async.resume()."""
        self.running, self.stopped = True, False


class NoRounds(AnyRounds):
    """Replaces the rounds after a rank has left the job. It keeps their buffers: they may still be in flight."""

    def __init__(self, before: AnyRounds) -> None:
        self._before = before


class Rounds(AnyRounds):
    """The rounds of one model, within one init().

    Args:
        difference: starts one bucket's part of a round, from the current weights; its result is A(s) - s, flat. Its
            arguments: the bucket, the process set, the round's number, and a state that is kept between rounds.
        interval_s: seconds from the end of a round to the start of the next. max_staleness: see Async.
    """

    def __init__(self, model: Model, difference: Callable[[Bucket, ProcessSet, int, State], Exchange],
                 interval_s: float, max_staleness: int | None) -> None:
        self._model = model
        self._difference = difference
        self._interval_s, self._max_staleness = interval_s, max_staleness
        self._parts: list[Exchange] = []
        self._stopping: tuple[np.ndarray, Posted] | None = None      # in a round: numbers of aborted and of all ranks
        self._states: dict[str, State] = {}
        self._patience = Patience()
        self._ended_at = time.monotonic()
        self._began_in = 0
        self._begun = 0

    def begin(self) -> None:
        group, name = self._model.group, self._model.name
        for bucket in self._model.weights:
            state = self._states.setdefault(bucket.name, State(bucket.name))
            self._parts.append(self._difference(bucket, group, self._begun, state))
        counts = np.array([not self.running, 1], np.float32)        # a rank in join() counts as none
        self._stopping = counts, c_fp_s(counts, group, average=False, name=f"{name}.stopping")
        self._began_in = self._model.step
        self._begun += 1

    def _done(self) -> bool:
        return self._stopping is not None and all(part.done() for part in self._parts) and self._stopping[1].done()

    def end(self) -> None:
        """Waits for the round in flight and adds its result."""
        assert self._stopping is not None
        for bucket, part in zip(self._model.weights, self._parts, strict=False):
            bucket.add(part.wait())
        counts, operation = self._stopping
        operation.wait()
        self.stopped = bool(counts[0] == counts[1])
        self._parts, self._stopping = [], None
        self._ended_at = time.monotonic()

    def advance(self) -> None:
        """After a step: ends a round that is done or too old, and begins one that is due."""
        age = self._model.step - self._began_in if self._stopping else 0
        if self._max_staleness is None:
            self._patience.wait_for(self._done, age)
        if self._stopping and (self._done() or (self._max_staleness is not None and age >= self._max_staleness)):
            self.end()
        if not self._stopping and self.running and time.monotonic() - self._ended_at >= self._interval_s:
            self.begin()

    def stop(self) -> None:
        """Takes part in rounds until all ranks have called this, so that none waits for a stopped one. Collective."""
        self.running = False
        if self._stopping:
            self.end()
        while not self.stopped:
            self.begin()
            self.end()
