"""The rounds of asynchronous averaging: when they begin, how long a step waits for them, and how they end.

A round of all ranks begins after a step, once the previous one has ended. Ranks match rounds by their number, so a slow
rank delays the next round, but no rank's training. Each round also counts the ranks that have called abort(): they
take part in rounds until all have.
"""
import time

import numpy as np

from bagua_hvd.algorithms.averaging import Mean
from bagua_hvd.algorithms.exchange import Exchange, Steps, exchange
from bagua_hvd.primitives import c_fp_s
from bagua_hvd.training.model import Model

STEPS = 4
LOOKS = 20          # polls in a wait


class Rounds:
    """The rounds of one model, within one init().

    Old averages cost accuracy, and waiting costs time. If max_staleness is not set, each step waits for a round from
    its fourth step on, but no longer than the step itself has taken. So a late rank costs the others at most half of
    their speed, and no rank waits forever for one that has made its last step.

    Args:
        interval_s: seconds from the end of a round to the start of the next. max_staleness: see Async.
    Attributes:
        running: whether advance() begins new rounds. stopped: whether all ranks have called abort().
        over: whether a rank has left the job: then there are no more rounds.
    """

    def __init__(self, model: Model, interval_s: float, max_staleness: int | None) -> None:
        self.running, self.stopped, self.over = True, False, False
        self._model = model
        self._interval_s, self._max_staleness = interval_s, max_staleness
        self._round: Exchange | None = None     # in flight
        self._began_in = 0                      # step
        self._ended_at = self._advanced_at = time.monotonic()

    @exchange
    def _average(self) -> Steps:
        group = self._model.group
        means = [Mean(bucket, group) for bucket in self._model.weights]
        counts = np.array([not self.running, 1], np.float32)    # aborted ranks, and all without those in join()
        counting = c_fp_s(counts, group, average=False, name=f"{self._model.name}.stopping")
        yield from (mean.operation for mean in means)
        yield counting
        for bucket, mean in zip(self._model.weights, means, strict=False):
            bucket.add(mean.difference())
        self.stopped = bool(counts[0] == counts[1])

    def _begin(self) -> None:
        self._round, self._began_in = self._average(), self._model.step

    def _end(self) -> None:
        """Waits for the round in flight, which adds its result."""
        if self._round is not None:
            self._round.wait()
            self._round, self._ended_at = None, time.monotonic()

    def advance(self) -> None:
        """After a step: ends a round that is done or too old, and begins one that is due."""
        if self.over:
            return
        now = time.monotonic()
        if self._round is not None:
            step, age = now - self._advanced_at, self._model.step - self._began_in
            while (self._max_staleness is None and age >= STEPS and not self._round.done()
                   and time.monotonic() < now + step):
                time.sleep(step / LOOKS)
            if self._round.done() or (self._max_staleness is not None and age >= self._max_staleness):
                self._end()
        self._advanced_at = time.monotonic()
        if self._round is None and self.running and self._advanced_at - self._ended_at >= self._interval_s:
            self._begin()

    def stop(self) -> None:
        """Takes part in rounds until all ranks have called this, so that none waits for a stopped one. Collective."""
        if self.over:
            return
        self.running = False
        self._end()
        while not self.stopped:
            self._begin()
            self._end()

    def resume(self) -> None:
        """See Async.resume()."""
        self.running, self.stopped = True, False
