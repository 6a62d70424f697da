"""Asynchronous averaging: ranks train by themselves, and in the background their weights are drawn together.

A round begins after a step when sync_interval_ms have passed since the last one ended, and takes a snapshot s_i of the
weights. While it is on its way training goes on. After the first step that finds it ended, what it says is added:

    x_i += A(s)_i - s_i

so that the local steps made in between are kept. What A is, async_average.py says; here is when rounds begin and end.

Snapshot and addition are made by the thread that trains, between a step and the next forward pass: weights never
change between forward and backward, a forward pass without a backward pass is nothing special, and there is no lock.
Rounds of all ranks match by their number: a rank that is slow delays the next round, not the others' training; pairs go
on by themselves (meetings.py). abort() takes part in rounds until all ranks have called it: with every round of all
travels how many have.

What rounds leave behind (replicas, say) is in no checkpoint: ranks that save at different moments would not fit
together. After a resume it begins anew, by one exchange in full precision.

For the first warmup_steps steps gradients are averaged as in full steps (full_steps.py); for at least 3/2 full_steps,
since ranks that step when they like can make none later.

Source: BAGUA, arXiv:2107.01499. Differs: no thread and no lock; all floating dtypes; a bound on staleness.
"""
import time
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import numpy as np

from bagua_hvd.algorithms.base import Safety, positive
from bagua_hvd.algorithms.exchange import Exchange
from bagua_hvd.algorithms.local import LocalSteps
from bagua_hvd.algorithms.patience import Patience
from bagua_hvd.core.exceptions import HorovodInternalError
from bagua_hvd.core.operations import Posted
from bagua_hvd.job.process_sets import ProcessSet
from bagua_hvd.job.runtime import runtime
from bagua_hvd.primitives import c_fp_s
from bagua_hvd.training.buckets import Bucket
from bagua_hvd.training.model import Model
from bagua_hvd.training.state import State


class AnyRounds(Protocol):
    """What begins and ends the rounds of a model: Rounds, Meetings, NoRounds."""

    def advance(self, interval_s: float, max_staleness: int | None) -> None:
        """After a step."""

    def stop(self, interval_s: float) -> None:
        """See Asynchronous.abort()."""

    def resume(self) -> None:
        """See Asynchronous.resume()."""


class Asynchronous(LocalSteps):
    """Averages weights in the background, by difference().

    Ranks may make different numbers of steps. When one leaves the job, the others go on without
    averaging. Before evaluation, a checkpoint, or the end, on all ranks:

        optimizer.algorithm.abort()         rounds under way end, none begins
        hvd.consensus(model)                the mean of the models
        optimizer.algorithm.resume()

    Args:
        sync_interval_ms: from the end of a round to the beginning of the next, 0 or more.
        warmup_steps: steps with averaged gradients before; at least 3/2 full_steps. full_steps: see FullSteps.
        max_staleness: steps after which a round that is still on its way is waited for, however long that takes: then
            all ranks must make as many steps, or end with abort(). None: see patience.py. Where ranks meet in pairs it
            is a bound for each pair: a round is a meeting of two, counts its own steps, and who waits for it is not
            waited for by ranks that do not meet it (meetings.py).
    """

    safety = Safety.E4
    asynchronous = True
    uses_weights = ("after_step",)

    def __init__(self, sync_interval_ms: float, warmup_steps: float, max_staleness: int | None,
                 full_steps: int | None) -> None:
        super().__init__(warmup_steps=warmup_steps, full_steps=full_steps)
        self.warmup_steps = max(self.warmup_steps, 3 * self.full_steps // 2)
        if not sync_interval_ms >= 0:
            raise ValueError(f"sync_interval_ms={sync_interval_ms!r}: expected milliseconds, 0 or more")
        self.sync_interval_ms = sync_interval_ms
        self.max_staleness = None if max_staleness is None else positive("max_staleness", max_staleness)
        self._models: weakref.WeakSet[Model] = weakref.WeakSet()

    def difference(self, bucket: Bucket, group: ProcessSet, number: int, state: State) -> Exchange:
        """Begins one bucket's part of a round, from the weights as they are now; its result is A(s) - s, flat.

        Args:
            bucket: of weights. number: of the round, from 0, the same on all ranks. state: kept from round to round.
        """
        raise NotImplementedError

    def full_step(self, model: Model | None) -> bool:
        # After the warm-up ranks may be in different steps.
        return model is not None and model.step < self.warmup_steps

    def prepare(self, model: Model) -> None:
        self._models.add(model)
        _in_use.add(model)

    def after_step(self, model: Model) -> None:
        if model.step + 1 >= self.warmup_steps:
            with self._peers_may_leave(model):
                self._rounds(model).advance(self.sync_interval_ms / 1000, self.max_staleness)

    def rounds_of(self, model: Model) -> AnyRounds:
        """What begins and ends this algorithm's rounds: of all ranks together, unless it says otherwise."""
        return Rounds(model, self)

    def _rounds(self, model: Model) -> AnyRounds:
        if "rounds" not in model.scratch:
            model.scratch["rounds"] = self.rounds_of(model)
        rounds: AnyRounds = model.scratch["rounds"]
        return rounds

    @contextmanager
    def _peers_may_leave(self, model: Model) -> Iterator[None]:
        """Ranks end when they like: those that are left go on, without rounds. Elastic jobs begin anew instead."""
        try:
            yield
        except HorovodInternalError as error:
            if error.cause != "left" or runtime.options.elastic:
                raise
            model.scratch["rounds"] = NoRounds(model.scratch["rounds"])
            warnings.warn(
                f"rank {error.rank} has left the job, so this rank trains on by itself: to average up to the end, "
                "call optimizer.algorithm.abort() on all ranks when they have made their steps", stacklevel=2)

    def abort(self) -> None:
        """Ends the rounds of all ranks, with a last one together; none begins until resume().

        Collective; ranks that have not called it yet go on training meanwhile. Again: nothing happens.
        """
        for model in sorted(self._models, key=lambda model: model.name):
            with self._peers_may_leave(model):
                self._rounds(model).stop(self.sync_interval_ms / 1000)

    def resume(self) -> None:
        """Rounds begin again. To be called on all ranks."""
        for model in self._models:
            self._rounds(model).resume()


class Rounds:
    """The rounds of one model, from one init() on.

    Attributes:
        running: whether new ones begin by themselves. stopped: whether all ranks have called abort().
    """

    def __init__(self, model: Model, algorithm: Asynchronous) -> None:
        self._model = model
        self._algorithm = algorithm
        self._parts: list[Exchange] = []
        self._stopping: tuple[np.ndarray, Posted] | None = None      # in a round: (how many have aborted, of all)
        self._states: dict[str, State] = {}
        self._patience = Patience()
        self._ended_at = time.monotonic()
        self._began_in = 0
        self._begun = 0
        self.running = True
        self.stopped = False

    def begin(self) -> None:
        group, name = self._model.group, self._model.name
        for bucket in self._model.weights:
            state = self._states.setdefault(bucket.name, State(bucket.name))
            self._parts.append(self._algorithm.difference(bucket, group, self._begun, state))
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

    def advance(self, interval_s: float, max_staleness: int | None) -> None:
        """After a step: ends a round that is done or too old, and begins one that is due."""
        age = self._model.step - self._began_in if self._stopping else 0
        if max_staleness is None:
            self._patience.wait_for(self._done, age)
        if self._stopping and (self._done() or (max_staleness is not None and age >= max_staleness)):
            self.end()
        if not self._stopping and self.running and time.monotonic() - self._ended_at >= interval_s:
            self.begin()

    def stop(self, interval_s: float = 0.0) -> None:
        """Takes part in rounds until all ranks do so from here: none waits for one that has stopped. Collective.

        interval_s: unused, since each of these rounds waits for the others.
        """
        self.running = False
        if self._stopping:
            self.end()
        while not self.stopped:
            self.begin()
            self.end()

    def resume(self) -> None:
        self.running, self.stopped = True, False


class NoRounds:
    """What is left of rounds when a rank has left the job. They may be on their way still, and keep their memory."""

    def __init__(self, before: AnyRounds) -> None:
        self._before = before

    def advance(self, interval_s: float, max_staleness: int | None) -> None:
        """There are none."""

    def stop(self, interval_s: float) -> None:
        """There are none."""

    def resume(self) -> None:
        """None begins again."""


_in_use: weakref.WeakSet[Model] = weakref.WeakSet()


def in_use() -> bool:
    """Whether an optimizer of this process averages asynchronously: its ranks make steps of their own."""
    return len(_in_use) > 0
