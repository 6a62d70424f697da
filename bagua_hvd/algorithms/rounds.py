"""The rounds of asynchronous averaging: when they begin, how long a step waits for them, and how they end.

A round of all ranks begins after a step, when the last one has ended. Ranks match rounds by their number, so a slow
rank delays the next round, and no rank's training. With each round travels how many ranks have called abort(): they
take part in rounds until all have. Pairs go on by themselves: meetings.py.
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
LOOKS = 20          # in a wait


class Patience:
    """How long a step waits for a round that is under way, where nobody has said how old that may become.

    Old averages cost accuracy, and waiting costs time. From its fourth step on each step waits for a round, but no
    longer than the step itself has taken. So a late rank costs the others at most half of their speed; and nobody waits
    for ever for a rank that has made its last step. A step is the time between two calls of wait_for().
    """

    def __init__(self) -> None:
        self._went_on_at = time.monotonic()

    def wait_for(self, done: Callable[[], bool], steps: int) -> None:
        """Waits for what has been on its way for so many steps."""
        now = time.monotonic()
        step = now - self._went_on_at
        while steps >= STEPS and not done() and time.monotonic() < now + step:
            time.sleep(step / LOOKS)
        self._went_on_at = time.monotonic()


class AnyRounds:
    """What begins and ends the rounds of a model: Rounds, Meetings; and by itself none.

    Attributes:
        running: whether new ones begin by themselves. stopped: whether all ranks have called abort().
    """

    running, stopped = True, False

    def advance(self) -> None:
        """After a step."""

    def stop(self) -> None:
        """See Async.abort()."""

    def resume(self) -> None:
        """See Async.resume()."""
        self.running, self.stopped = True, False


class NoRounds(AnyRounds):
    """What is left of rounds when a rank has left the job. They may be on their way still, and keep their memory."""

    def __init__(self, before: AnyRounds) -> None:
        self._before = before


class Rounds(AnyRounds):
    """The rounds of one model, from one init() on.

    Args:
        difference: begins one bucket's part of a round, from the weights as they are now; its result is A(s) - s, flat.
            It is given the bucket, the ranks, the round's number and a state that is kept from round to round.
        interval_s: from the end of a round to the beginning of the next. max_staleness: see Async.
    """

    def __init__(self, model: Model, difference: Callable[[Bucket, ProcessSet, int, State], Exchange],
                 interval_s: float, max_staleness: int | None) -> None:
        self._model = model
        self._difference = difference
        self._interval_s, self._max_staleness = interval_s, max_staleness
        self._parts: list[Exchange] = []
        self._stopping: tuple[np.ndarray, Posted] | None = None      # in a round: (how many have aborted, of all)
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
        """Waits for the round under way and adds what it says."""
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
        """Takes part in rounds until all ranks do so from here: none waits for one that has stopped. Collective."""
        self.running = False
        if self._stopping:
            self.end()
        while not self.stopped:
            self.begin()
            self.end()
