"""Asynchronous model averaging: ranks train by themselves, and in the background their weights are drawn together.

A round begins after a step when sync_interval_ms have passed since the last one ended, and takes a snapshot s_i of the
weights. While it is on its way training goes on. After the first step that finds it ended, what it says is added:

    x_i += A(s)_i - s_i

so that the local steps made in between are kept. A by peer_selection_mode and codec:

    all                A(s)_i = (1/n) sum_j s_j
    shift_one          A(s)_i = (s_i + s_p) / 2, p the peer of this round (decentralized.py)
    ring               A(s)_i = (s_i + s_left + s_right) / 3
    all, codec         d_i = s_i - y;  y += mean_i D(Q(d_i));  A(s)_i - s_i = y - s_i + (d_i - D(Q(d_i)))
                       y is where all stood after the last round, equal everywhere; what Q loses of d_i stays in x_i
    ring, codec        replicas as in choco.py with gamma = 1:  A(s)_i - s_i = (L + R - 2 W) / 3

Snapshot and addition are made by the thread that trains, between a step and the next forward pass: weights never
change between forward and backward, a forward pass without a backward pass is nothing special, and there is no lock.
Rounds match by their number: a rank that is slow delays the next round, not the others' training. abort() takes part in
rounds until all ranks have called it: with every round travels how many have.

What rounds leave behind (y, replicas) is in no checkpoint: ranks that save at different moments would not fit together.
After a resume it begins anew, by one exchange in full precision.

For the first warmup_steps steps gradients are averaged as in gradient_allreduce.

Wire per round: all, 2 N (n-1)/n elements; shift_one N, ring 2 N; with minmax_uint8 bytes instead of elements.
Memory: 2 N elements during a round; with a codec N or 3 N float32 more.
Source: BAGUA, arXiv:2107.01499 (all); Lian et al. (AD-PSGD), arXiv:1710.06952 (shift_one, here in rounds). Differs: no
thread and no lock; all floating dtypes; the cells with codecs and peers; a bound on staleness.
"""
import time
import weakref
from typing import Any

import numpy as np

from bagua_hvd.algorithms.averaging import Mean
from bagua_hvd.algorithms.base import blocks, positive
from bagua_hvd.algorithms.local import LocalSteps
from bagua_hvd.algorithms.replicas import replicas_of
from bagua_hvd.codecs import Codec
from bagua_hvd.primitives import ErrorState, c_fp_s, c_lp_s, d_fp_s, d_lp_s, minmax_uint8
from bagua_hvd.training.model import Model
from bagua_hvd.training.state import State

MODES = ("all", "shift_one", "ring")


class _ToMean:
    """all, in full precision: one bucket's part of a round."""

    def __init__(self, bucket, group, number, codec, state):
        self._mean = Mean(bucket, group)
        self.done = self._mean.done

    def delta(self):
        return self._mean.wait_difference()


class _ToPeers:
    """shift_one or ring, in full precision."""

    topology: str

    def __init__(self, bucket, group, number, codec, state):
        self._snapshot = bucket.read(workspace="snapshot")
        self._out = bucket.workspace("average", self._snapshot.size, self._snapshot.dtype)
        self._operation = d_fp_s(
            self._snapshot, group, topology=self.topology, round=number, out=self._out, name=bucket.name
        )
        self.done = self._operation.done

    def delta(self):
        self._operation.wait()
        self._out -= self._snapshot
        return self._out


class _ToPartner(_ToPeers):
    topology = "shift_one"


class _ToNeighbours(_ToPeers):
    topology = "ring"


class _ToMeanByCodes:
    """all, with a codec."""

    def __init__(self, bucket, group, number, codec, state):
        count, size = bucket.count, group.size()
        self._y = state.keep("y", lambda: Mean(bucket, group, f"{bucket.name}.first").wait().copy())
        self._error = ErrorState(count, size)
        self._error.server = state.keep("server_error", lambda: self._error.server)
        self._difference = bucket.read(workspace="difference")
        self._difference -= self._y
        self._mean = bucket.workspace("mean of differences", count, self._difference.dtype)
        self._operation = c_lp_s(
            self._difference, group, codec=codec, error=self._error, out=self._mean, name=bucket.name,
            seed=bucket.seed(number),
        )
        self.done = self._operation.done

    def delta(self):
        self._operation.wait()
        for part in blocks(self._mean.size):
            self._y[part] += self._mean[part]
            self._mean[part] -= self._difference[part]
            self._mean[part] += self._error.worker[part]
        return self._mean


class _ToNeighboursByCodes:
    """ring, with a codec."""

    def __init__(self, bucket, group, number, codec, state):
        self._replicas = replicas_of(bucket, group, hierarchical=False, state=state)
        self._delta = bucket.workspace("delta", bucket.count, np.float32)
        self._difference = bucket.read(workspace="difference")
        self._difference -= self._replicas.own
        self._operation = d_lp_s(
            self._difference.astype(np.float32, copy=False), group, codec, self._replicas, name=bucket.name,
            seed=bucket.seed(number),
        )
        self.done = self._operation.done

    def delta(self):
        self._operation.wait()
        W, L, R = self._replicas.own, self._replicas.left, self._replicas.right
        for part in blocks(W.size):
            self._delta[part] = (L[part] + R[part] - 2 * W[part]) / 3
        return self._delta


_PARTS = {
    ("all", False): _ToMean, ("shift_one", False): _ToPartner, ("ring", False): _ToNeighbours,
    ("all", True): _ToMeanByCodes, ("ring", True): _ToNeighboursByCodes,
}


class _Rounds:
    """The rounds of one model, from one init() on.

    Attributes:
        running: whether new ones begin by themselves. stopped: whether all ranks have called abort().
    """

    def __init__(self, model, part, codec):
        self._model = model
        self._part = part
        self._codec = codec
        self._parts = []
        self._stopping = None       # in a round: (how many have called abort(), of how many), and the sum's operation
        self._states = {}
        self._ended_at = time.monotonic()
        self._began_in = 0
        self._begun = 0
        self.running = True
        self.stopped = False

    def begin(self):
        group, name = self._model.group, self._model.name
        for bucket in self._model.weights:
            state = self._states.setdefault(bucket.name, State(bucket.name))
            self._parts.append(self._part(bucket, group, self._begun, self._codec, state))
        counts = np.array([not self.running, 1], np.float32)        # a rank in join() counts as none
        self._stopping = counts, c_fp_s(counts, group, average=False, name=f"{name}.stopping")
        self._began_in = self._model.step
        self._begun += 1

    def end(self):
        """Waits for the round under way and adds what it says."""
        for bucket, part in zip(self._model.weights, self._parts, strict=False):
            bucket.add(part.delta())
        counts, operation = self._stopping
        operation.wait()
        self.stopped = counts[0] == counts[1]
        self._parts, self._stopping = [], None
        self._ended_at = time.monotonic()

    def advance(self, interval_s, max_staleness):
        """After a step: ends a round that is done or too old, and begins one that is due."""
        if self._stopping:
            too_old = max_staleness is not None and self._model.step - self._began_in >= max_staleness
            if too_old or all(operation.done() for operation in (*self._parts, self._stopping[1])):
                self.end()
        if not self._stopping and self.running and time.monotonic() - self._ended_at >= interval_s:
            self.begin()

    def stop(self):
        """Takes part in rounds until all ranks do so from here: none waits for one that has stopped. Collective."""
        self.running = False
        if self._stopping:
            self.end()
        while not self.stopped:
            self.begin()
            self.end()

    def resume(self):
        self.running, self.stopped = True, False


class Async(LocalSteps):
    """Averages weights in the background.

    Ranks may make different numbers of steps. Before evaluation, a checkpoint, or the end, on all ranks:

        optimizer.algorithm.abort()         rounds under way end, none begins
        hvd.consensus(model)                the mean of the models
        optimizer.algorithm.resume()

    Args:
        peer_selection_mode: "all", "shift_one" or "ring".
        sync_interval_ms: from the end of a round to the beginning of the next, 0 or more.
        warmup_steps: steps with averaged gradients before.
        codec: of bagua_hvd.primitives, for differences instead of weights; None: full precision. Not with shift_one.
        max_staleness: steps after which a round that is still on its way is waited for; None: never.
    """

    asynchronous = True

    def __init__(self, peer_selection_mode: str = "all", sync_interval_ms: int = 500, warmup_steps: float = 0,
                 codec: Codec | None = None, max_staleness: int | None = None) -> None:
        super().__init__(warmup_steps=warmup_steps)
        if peer_selection_mode not in MODES:
            raise ValueError(f"peer_selection_mode={peer_selection_mode!r}: expected one of {', '.join(MODES)}")
        if peer_selection_mode == "shift_one" and codec is not None:
            raise ValueError(
                "peer_selection_mode='shift_one' takes no codec: codes are of differences to replicas of fixed "
                "neighbours; use peer_selection_mode='ring'"
            )
        if not sync_interval_ms >= 0:
            raise ValueError(f"sync_interval_ms={sync_interval_ms!r}: expected milliseconds, 0 or more")
        self.peer_selection_mode = peer_selection_mode
        self.sync_interval_ms = sync_interval_ms
        self.codec = codec
        self.max_staleness = None if max_staleness is None else positive("max_staleness", max_staleness)
        self._models: weakref.WeakSet[Model] = weakref.WeakSet()

    def prepare(self, model: Model) -> None:
        if self.peer_selection_mode != "all" and model.group.size() < 2:
            raise ValueError(
                f"async with peer_selection_mode={self.peer_selection_mode!r} needs two ranks or more: one has no peer"
            )
        self._models.add(model)
        _in_use.add(model)

    def after_step(self, model: Model) -> None:
        if model.step + 1 >= self.warmup_steps:
            self._rounds(model).advance(self.sync_interval_ms / 1000, self.max_staleness)

    def _rounds(self, model):
        if "rounds" not in model.scratch:
            part = _PARTS[self.peer_selection_mode, self.codec is not None]
            model.scratch["rounds"] = _Rounds(model, part, self.codec)
        return model.scratch["rounds"]

    def abort(self) -> None:
        """Ends the rounds of all ranks, with a last one together; none begins until resume().

        Collective; ranks that have not called it yet go on training meanwhile. Again: nothing happens.
        """
        for model in sorted(self._models, key=lambda model: model.name):
            self._rounds(model).stop()

    def resume(self) -> None:
        """Rounds begin again. To be called on all ranks."""
        for model in self._models:
            self._rounds(model).resume()


class AsyncLowPrecision(Async):
    """Async, all, by 8-bit differences. Arguments as for Async."""

    def __init__(self, sync_interval_ms: int = 500, warmup_steps: float = 0, codec: Codec | None = minmax_uint8,
                 max_staleness: int | None = None) -> None:
        super().__init__("all", sync_interval_ms, warmup_steps, codec, max_staleness)


class AsyncDecentralized(Async):
    """Async with one peer in each round. Arguments as for Async."""

    def __init__(self, peer_selection_mode: str = "shift_one", sync_interval_ms: int = 500, warmup_steps: float = 0,
                 max_staleness: int | None = None) -> None:
        super().__init__(peer_selection_mode, sync_interval_ms, warmup_steps, None, max_staleness)


class AsyncLowPrecisionDecentralized(Async):
    """Async with the neighbours on a ring, by 8-bit differences. Arguments as for Async."""

    def __init__(self, sync_interval_ms: int = 500, warmup_steps: float = 0, codec: Codec | None = minmax_uint8,
                 max_staleness: int | None = None) -> None:
        super().__init__("ring", sync_interval_ms, warmup_steps, codec, max_staleness)


_in_use: weakref.WeakSet = weakref.WeakSet()


def in_use() -> Any:
    """Whether an optimizer of this process averages asynchronously: its ranks make steps of their own."""
    return len(_in_use) > 0
