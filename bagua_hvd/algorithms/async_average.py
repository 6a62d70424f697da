"""Async: each rank trains by itself; weights are averaged in the background.

A round begins after a step, once sync_interval_ms have passed since the previous round ended, with a snapshot s_i of
the weights. Training continues. After the first step that finds the round complete,

    x_i += (1/n) sum_j s_j - s_i

which keeps the local steps made in between. The training thread takes the snapshot and adds the result between a step
and the next forward pass: weights never change between forward and backward, and no lock is needed. A late rank delays
the next round, but not the training. Each round also counts the ranks that have called abort(): they take part in
rounds until all have.

In the first warmup_steps steps, at least 3/2 full_steps, gradients are averaged as in full steps (full_steps.py). Later
full steps are impossible, since ranks no longer step together.

Wire per round, N elements: 2 N (n-1)/n. Memory: 2 N elements during a round.
Source: BAGUA, arXiv:2107.01499. Differs: no thread and no lock; all floating dtypes; a bound on staleness.
"""
import time
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from bagua_hvd.algorithms.base import Safety, checked, positive
from bagua_hvd.algorithms.exchange import Exchange, Steps, exchange
from bagua_hvd.algorithms.full_steps import LocalSteps, Mean
from bagua_hvd.core.exceptions import HorovodInternalError
from bagua_hvd.job.runtime import runtime
from bagua_hvd.primitives import c_fp_s
from bagua_hvd.training.model import Model


class Async(LocalSteps):
    """Averages weights in the background.

    Ranks may make different numbers of steps. When one leaves the job, the others continue without
    averaging. Before evaluation, a checkpoint, or the end of training, call on all ranks:

        optimizer.algorithm.abort()         finishes rounds in flight, starts none
        hvd.consensus(model)                the mean of the models
        optimizer.algorithm.resume()

    Args:
        sync_interval_ms: milliseconds from the end of a round to the start of the next, 0 or more.
        warmup_steps: initial steps with averaged gradients; at least 3/2 full_steps. full_steps: see FullSteps.
        max_staleness: steps after which training blocks on a round still in flight, without a timeout: then all ranks
            must make the same number of steps, or end with abort(). None: see Rounds.
    """

    safety = Safety.E4
    asynchronous = True
    uses_weights = ("after_step",)

    def __init__(self, sync_interval_ms: float = 0, warmup_steps: float = 0, max_staleness: int | None = None,
                 full_steps: int | None = None) -> None:
        super().__init__(warmup_steps=warmup_steps, full_steps=full_steps)
        self.warmup_steps = max(self.warmup_steps, 3 * self.full_steps // 2)
        self.sync_interval_ms = checked("sync_interval_ms", sync_interval_ms, lambda ms: ms >= 0,
                                       "milliseconds, 0 or more")
        self.max_staleness = None if max_staleness is None else positive("max_staleness", max_staleness)
        self._models: weakref.WeakSet[Model] = weakref.WeakSet()

    def prepare(self, model: Model) -> None:
        self._models.add(model)

    def after_step(self, model: Model) -> None:
        if model.step + 1 >= self.warmup_steps:
            with self._peers_may_leave(model):
                self._rounds(model).advance()

    def _rounds(self, model: Model) -> "Rounds":
        if "rounds" not in model.scratch:
            model.scratch["rounds"] = Rounds(model, self.sync_interval_ms / 1000, self.max_staleness)
        rounds: Rounds = model.scratch["rounds"]
        return rounds

    @contextmanager
    def _peers_may_leave(self, model: Model) -> Iterator[None]:
        """When a rank leaves the job, the others train on without rounds. Elastic jobs restart instead."""
        try:
            yield
        except HorovodInternalError as error:
            if error.cause != "left" or runtime.options.elastic:
                raise
            self._rounds(model).over = True
            warnings.warn(
                f"rank {error.rank} has left the job, so this rank continues without averaging. To average until "
                "training ends, call optimizer.algorithm.abort() on every rank after its last step", stacklevel=2)

    def abort(self) -> None:
        """Finishes the rounds, on all ranks together; none starts until resume().

        Collective; ranks that have not called it yet continue training meanwhile. A second call does nothing.
        """
        for model in sorted(self._models, key=lambda model: model.name):
            with self._peers_may_leave(model):
                self._rounds(model).stop()

    def resume(self) -> None:
        """Starts rounds again. Call it on all ranks."""
        for model in self._models:
            self._rounds(model).resume()


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
