"""Async: each rank trains by itself; weights are averaged in the background, in full precision or compressed.

A round begins after a step, once sync_interval_ms have passed since the previous round ended, with a snapshot s_i of
the weights. Training continues. After the first step that finds the round complete, x_i += A(s)_i - s_i, which keeps
the local steps made in between. A(s)_i - s_i is

    all             (1/n) sum_j s_j - s_i                       mean
    pairs           (s_i + s_p) / 2 - s_i                       peers; p: the peer of this round (decentralized.py)
    ring            (s_i + s_left + s_right) / 3 - s_i          peers

With a codec Q, ranks send their difference from the last average y, d_i = s_i - y:

    all             y += mean_i D(Q(d_i))                       coded_mean; y is equal everywhere
                    x_i += y - s_i + (d_i - D(Q(d_i)))          the residual of Q stays in x_i
    ring            W += D(Q(s_i - W)), R and L alike           coded_ring; W, R, L: replicas as in choco.py, gamma = 1
                    x_i += (L + R - 2 W) / 3

The training thread takes the snapshot and adds the result between a step and the next forward pass: weights never
change between forward and backward, and no lock is needed. Rounds of all ranks are in rounds.py. In pairs, each rank
moves from peer to peer at its own pace, past late ones (pair_rounds.py). In a ring, a rank waits for both neighbours.
hierarchical: hosts act as ranks, with the mean of their ranks' s; the residual of a host's sum stays in the rank that
encoded it. A late rank then delays the next round, but not the training.

The state of rounds (such as replicas) is not checkpointed, since ranks save at different moments and their states would
not match. After a resume, one exchange in full precision rebuilds it.

In the first warmup_steps steps, at least 3/2 full_steps, gradients are averaged as in full steps (full_steps.py). Later
full steps are impossible, since ranks no longer step together.

Wire per round, N elements: all 2 N (n-1)/n, pairs N, ring 2 N; with minmax_uint8 a quarter of that.
Memory: 2 N elements during a round, and for each peer that is late; with a codec N more always, in a ring 3 N float32.
Source: BAGUA, arXiv:2107.01499; pairs: AD-PSGD, Lian et al., arXiv:1710.06952. Differs: no thread and no lock; all
floating dtypes; a bound on staleness; peers in turn.
"""
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np

from bagua_hvd.algorithms.averaging import Mean
from bagua_hvd.algorithms.base import Safety, blocks, checked, positive, valid_codec
from bagua_hvd.algorithms.decentralized import PAIRS, cycle, round_of
from bagua_hvd.algorithms.exchange import Exchange, Steps, exchange
from bagua_hvd.algorithms.full_steps import LocalSteps
from bagua_hvd.algorithms.pair_rounds import PairRounds
from bagua_hvd.algorithms.replicas import host_count, replicas_of, require_peers
from bagua_hvd.algorithms.rounds import AnyRounds, NoRounds, Rounds
from bagua_hvd.codecs import Codec
from bagua_hvd.core.exceptions import HorovodInternalError
from bagua_hvd.job.process_sets import ProcessSet
from bagua_hvd.job.runtime import runtime
from bagua_hvd.primitives import ErrorState, c_lp_s, d_fp_s, d_lp_s
from bagua_hvd.training.buckets import Bucket
from bagua_hvd.training.model import Model
from bagua_hvd.training.state import State

MODES = ("all", *PAIRS, "ring")


@exchange
def mean(bucket: Bucket, group: ProcessSet) -> Steps:
    """(1/n) sum_j s_j - s_i"""
    all_of_them = Mean(bucket, group)
    yield all_of_them.operation
    return all_of_them.difference()


@exchange
def peers(group: ProcessSet, topology: str, bucket: Bucket, round: int, place: int,
          hierarchical: bool = False) -> Steps:
    """The average with this round's peers, minus s_i. place: number of the buffers."""
    s = bucket.read(workspace=f"snapshot.{place}")
    average = bucket.workspace(f"average.{place}", s.size, s.dtype)
    yield d_fp_s(s, group, topology=topology, round=round, out=average, hierarchical=hierarchical,
                 name=f"{bucket.name}.{round}")
    average -= s
    return average


@exchange
def coded_mean(bucket: Bucket, group: ProcessSet, codec: Codec, hierarchical: bool, number: int, state: State) -> Steps:
    """y - s_i + (d_i - D(Q(d_i))); hierarchical: the residual of a host's sum, on the rank that encoded it."""
    y: np.ndarray = state.keep("y", lambda: Mean(bucket, group, f"{bucket.name}.first").wait().copy())
    error = ErrorState(bucket.count, group.size(), hierarchical)
    error.server = state.keep("server_error", lambda: error.server)
    d = bucket.read(workspace="difference")
    d -= y
    found = bucket.workspace("mean of differences", bucket.count, d.dtype)
    hosts = host_count(group) if hierarchical else 1
    ranks_per_host = group.size() / hosts if hosts > 1 else 1       # codes are of a host's sum divided by this
    yield c_lp_s(d, group, codec=codec, error=error, out=found, name=bucket.name, seed=bucket.seed(number),
                 hierarchical=hierarchical)
    for part in blocks(found.size):
        y[part] += found[part]
        found[part] -= d[part]
        found[part] += ranks_per_host * error.worker[part]
    return found


@exchange
def coded_ring(bucket: Bucket, group: ProcessSet, codec: Codec, hierarchical: bool, number: int, state: State) -> Steps:
    """(L + R - 2 W) / 3; hierarchical: h - s_i + (L + R - 2 W) / 3, where h is the mean of a host's ranks."""
    replicas = replicas_of(bucket, group, hierarchical, state)
    delta = bucket.workspace("delta", bucket.count, np.float32)
    d = bucket.read(workspace="difference")
    d -= replicas.own
    delta[:] = d
    yield d_lp_s(delta, group, codec, replicas, name=bucket.name, seed=bucket.seed(number), hierarchical=hierarchical,
                 after=(1, -2 / 3, 1 / 3, 1 / 3))
    delta -= d
    return delta


class Async(LocalSteps):
    """Averages weights in the background.

    Ranks may make different numbers of steps. When one leaves the job, the others continue without
    averaging. Before evaluation, a checkpoint, or the end of training, call on all ranks:

        optimizer.algorithm.abort()         finishes rounds in flight, starts none
        hvd.consensus(model)                the mean of the models
        optimizer.algorithm.resume()

    Args:
        peer_selection_mode: "all"; pairs: "shift_one", "exponential" or "random"; or "ring".
        sync_interval_ms: milliseconds from the end of a round to the start of the next, 0 or more.
        warmup_steps: initial steps with averaged gradients; at least 3/2 full_steps. full_steps: see FullSteps.
        codec: from bagua_hvd.codecs, to send differences instead of weights; None: full precision. Not with pairs.
        max_staleness: steps after which training blocks on a round still in flight, without a timeout: then all ranks
            must make the same number of steps, or end with abort(). None: see Patience (rounds.py). In pairs the bound
            holds for each pair: a round has two ranks and counts its own steps, and other ranks do not wait for it.
        hierarchical: full precision within hosts, and hosts as the peers; with "all" and no codec, it only changes the
            path of the bytes.
    """

    safety = Safety.E4
    asynchronous = True
    uses_weights = ("after_step",)

    def __init__(self, peer_selection_mode: str = "all", sync_interval_ms: float = 0, warmup_steps: float = 0,
                 codec: Codec | None = None, max_staleness: int | None = None, hierarchical: bool = False,
                 full_steps: int | None = None) -> None:
        super().__init__(warmup_steps=warmup_steps, full_steps=full_steps)
        self.warmup_steps = max(self.warmup_steps, 3 * self.full_steps // 2)
        if peer_selection_mode not in MODES:
            raise ValueError(f"peer_selection_mode={peer_selection_mode!r}: expected one of {', '.join(MODES)}")
        if peer_selection_mode in PAIRS and codec is not None:
            raise ValueError(
                f"peer_selection_mode={peer_selection_mode!r} takes no codec: codes are of differences to replicas of "
                "fixed neighbours; use peer_selection_mode='ring'"
            )
        self.peer_selection_mode = peer_selection_mode
        self.sync_interval_ms = checked("sync_interval_ms", sync_interval_ms, lambda ms: ms >= 0,
                                       "milliseconds, 0 or more")
        self.max_staleness = None if max_staleness is None else positive("max_staleness", max_staleness)
        self.codec = None if codec is None else valid_codec(codec)
        self.hierarchical = hierarchical
        self._models: weakref.WeakSet[Model] = weakref.WeakSet()

    def full_step(self, model: Model | None) -> bool:
        # After the warm-up ranks may be in different steps.
        return model is not None and model.step < self.warmup_steps

    def prepare(self, model: Model) -> None:
        if self.peer_selection_mode != "all":
            require_peers(model.group, f"async with peer_selection_mode={self.peer_selection_mode!r}")
        self._models.add(model)

    def takes_more(self, model: Model) -> bool:
        return "rounds" not in model.scratch or self._rounds(model).stopped

    def after_step(self, model: Model) -> None:
        if model.step + 1 >= self.warmup_steps:
            with self._peers_may_leave(model):
                self._rounds(model).advance()

    def _rounds(self, model: Model) -> AnyRounds:
        if "rounds" not in model.scratch:
            model.scratch["rounds"] = self._rounds_of(model)
        rounds: AnyRounds = model.scratch["rounds"]
        return rounds

    def _rounds_of(self, model: Model) -> AnyRounds:
        mode, when = self.peer_selection_mode, (self.sync_interval_ms / 1000, self.max_staleness)
        if mode not in PAIRS or self.hierarchical:
            return Rounds(model, self._difference, *when)
        topology, rounds = cycle(mode, model.group.size())
        return PairRounds(model, partial(peers, model.group, topology), topology, rounds, mode != "random", *when)

    def _difference(self, bucket: Bucket, group: ProcessSet, number: int, state: State) -> Exchange:
        mode, hierarchical = self.peer_selection_mode, self.hierarchical
        if self.codec is not None:
            coded = coded_mean if mode == "all" else coded_ring
            return coded(bucket, group, self.codec, hierarchical, number, state)
        if mode == "all":
            return mean(bucket, group)
        if mode == "ring":
            return peers(group, "ring", bucket, 0, 0, hierarchical)
        topology, round = round_of(mode, host_count(group), number)
        return peers(group, topology, bucket, round, 0, hierarchical=True)

    @contextmanager
    def _peers_may_leave(self, model: Model) -> Iterator[None]:
        """When a rank leaves the job, the others train on without rounds. Elastic jobs restart instead."""
        try:
            yield
        except HorovodInternalError as error:
            if error.cause != "left" or runtime.options.elastic:
                raise
            model.scratch["rounds"] = NoRounds(model.scratch["rounds"])
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
