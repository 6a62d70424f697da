"""Async: in the background, the mean of all weights, or of a few peers' weights, as they are or by codes.

s_i: the weights when the round began (asynchronous.py). A round adds to x_i:

    all             (1/n) sum_j s_j - s_i                       mean
    pairs           (s_i + s_p) / 2 - s_i                       peers; p: the peer of this round (decentralized.py)
    ring            (s_i + s_left + s_right) / 3 - s_i          peers

With a codec Q the ranks send how far they are from where they were last, d_i = s_i - y:

    all             y += mean_i D(Q(d_i))                       coded_mean; y is equal everywhere
                    x_i += y - s_i + (d_i - D(Q(d_i)))          what Q loses of d_i stays in x_i
    ring            W += D(Q(s_i - W)), R and L alike           coded_ring; W, R, L: replicas as in choco.py, gamma = 1
                    x_i += (L + R - 2 W) / 3

In pairs each rank goes from peer to peer at its own pace, and does not stay with one that is late (meetings.py). In a
ring a rank waits for both neighbours. hierarchical: hosts take the place of ranks, with the mean of their ranks' s;
then a late rank delays the next round, but not the training.

Wire per round, N elements: all 2 N (n-1)/n, pairs N, ring 2 N; with minmax_uint8 a quarter of that.
Memory: 2 N elements during a round, and for each peer that is late; with a codec N more always, in a ring 3 N float32.
Source: BAGUA, arXiv:2107.01499; pairs: AD-PSGD, Lian et al., arXiv:1710.06952. Differs: peers in turn.
"""
from functools import partial

import numpy as np

from bagua_hvd.algorithms.asynchronous import AnyRounds, Asynchronous
from bagua_hvd.algorithms.averaging import Mean
from bagua_hvd.algorithms.base import blocks
from bagua_hvd.algorithms.decentralized import PAIRS, cycle, round_of
from bagua_hvd.algorithms.exchange import Exchange, Steps, exchange
from bagua_hvd.algorithms.meetings import Meetings
from bagua_hvd.algorithms.replicas import host_count, replicas_of, require_peers
from bagua_hvd.codecs import Codec
from bagua_hvd.job.process_sets import ProcessSet
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
    """The average with this round's peers - s_i; place: of the memory."""
    s = bucket.read(workspace=f"snapshot.{place}")
    average = bucket.workspace(f"average.{place}", s.size, s.dtype)
    yield d_fp_s(s, group, topology=topology, round=round, out=average, hierarchical=hierarchical,
                 name=f"{bucket.name}.{round}")
    average -= s
    return average


@exchange
def coded_mean(bucket: Bucket, group: ProcessSet, codec: Codec, hierarchical: bool, number: int, state: State) -> Steps:
    """y - s_i + (d_i - D(Q(d_i))); of a host's mean, what Q loses stays with the member that has encoded it."""
    y: np.ndarray = state.keep("y", lambda: Mean(bucket, group, f"{bucket.name}.first").wait().copy())
    error = ErrorState(bucket.count, group.size(), hierarchical)
    error.server = state.keep("server_error", lambda: error.server)
    d = bucket.read(workspace="difference")
    d -= y
    found = bucket.workspace("mean of differences", bucket.count, d.dtype)
    yield c_lp_s(d, group, codec=codec, error=error, out=found, name=bucket.name, seed=bucket.seed(number),
                 hierarchical=hierarchical)
    for part in blocks(found.size):
        y[part] += found[part]
        found[part] -= d[part]
        found[part] += error.worker[part]
    return found


@exchange
def coded_ring(bucket: Bucket, group: ProcessSet, codec: Codec, hierarchical: bool, number: int, state: State) -> Steps:
    """(L + R - 2 W) / 3; of hosts h - s_i + (L + R - 2 W) / 3, where h is the mean of a host's ranks."""
    replicas = replicas_of(bucket, group, hierarchical, state)
    delta = bucket.workspace("delta", bucket.count, np.float32)
    d = bucket.read(workspace="difference")
    d -= replicas.own
    delta[:] = d
    yield d_lp_s(delta, group, codec, replicas, name=bucket.name, seed=bucket.seed(number), hierarchical=hierarchical,
                 after=(1, -2 / 3, 1 / 3, 1 / 3))
    delta -= d
    return delta


class Async(Asynchronous):
    """Averages weights in the background.

    Args:
        peer_selection_mode: "all"; in pairs "shift_one", "exponential" or "random"; or "ring".
        codec: of bagua_hvd.codecs, for differences instead of weights; None: full precision. Not with pairs.
        hierarchical: full precision within hosts, and hosts as the peers; for all without codec it changes nothing but
            the way that the bytes take.
        sync_interval_ms, warmup_steps, max_staleness, full_steps: see Asynchronous.
    """

    def __init__(self, peer_selection_mode: str = "all", sync_interval_ms: float = 0, warmup_steps: float = 0,
                 codec: Codec | None = None, max_staleness: int | None = None, hierarchical: bool = False,
                 full_steps: int | None = None) -> None:
        super().__init__(sync_interval_ms, warmup_steps, max_staleness, full_steps)
        if peer_selection_mode not in MODES:
            raise ValueError(f"peer_selection_mode={peer_selection_mode!r}: expected one of {', '.join(MODES)}")
        if peer_selection_mode in PAIRS and codec is not None:
            raise ValueError(
                f"peer_selection_mode={peer_selection_mode!r} takes no codec: codes are of differences to replicas of "
                "fixed neighbours; use peer_selection_mode='ring'"
            )
        self.peer_selection_mode = peer_selection_mode
        self.codec = codec
        self.hierarchical = hierarchical

    def prepare(self, model: Model) -> None:
        if self.peer_selection_mode != "all":
            require_peers(model.group, f"async with peer_selection_mode={self.peer_selection_mode!r}")
        super().prepare(model)

    def rounds_of(self, model: Model) -> AnyRounds:
        mode = self.peer_selection_mode
        if mode not in PAIRS or self.hierarchical:
            return super().rounds_of(model)
        topology, rounds = cycle(mode, model.group.size())
        return Meetings(model, partial(peers, model.group, topology), topology, rounds, in_order=mode != "random")

    def difference(self, bucket: Bucket, group: ProcessSet, number: int, state: State) -> Exchange:
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
