"""Stochastic gradient push (SGP): averages of weights over links that go one way, change, or fail.

Rank i has x_i and a weight w_i, at first 1; its model is z_i = x_i / w_i. After each step of the user's optimizer

    x_i += z_i^new - z_i                            what the step did
    p_i  = 1 / (1 + number of ranks it sends to)
    x_i  = p_i x_i + sum_j p_j x_j                  over those j who send to i
    w_i  = p_i w_i + sum_j p_j w_j
    z_i  = x_i / w_i

What a rank keeps and sends are shares of what it has: so sum_i x_i and sum_i w_i stay what they are whoever sends to
whom, and every z_i goes to the mean, though no rank knows who will send to it. A link that a rank does not use in a
round costs speed of mixing, and nothing else.

By default rank i sends to i + 2^k, k = 0, 1, ... ceil(log2 n) - 1 and again (one-peer exponential graph).

hierarchical: hosts stand for ranks. The first rank of a host h has the sum of its s_h ranks' x_i and w_i, pushes it as
above, and gives each of them an equal part of what it has then:

    x_h  = sum_(i in h) x_i                         w_h likewise
    x_h  = p_h x_h + sum_j p_j x_j                  over those hosts j that send to h
    x_i  = x_h / s_h                                so all of a host have the same model

Wire: N elements for each rank that is sent to; hierarchical: for each host, and 2 N for each other rank of a host,
within it.
Memory: N elements (x), this rank's own.
Source: Assran et al., arXiv:1811.10792, algorithm 1; Kempe et al., FOCS 2003.  Differs: waits for each round.
"""
from collections.abc import Callable, Sequence

import numpy as np

from bagua_hvd.algorithms.exchange import Steps, exchange
from bagua_hvd.algorithms.local import LocalSteps
from bagua_hvd.algorithms.replicas import hosts_of
from bagua_hvd.job.process_sets import ProcessSet
from bagua_hvd.primitives import are_peers, push
from bagua_hvd.training.buckets import Bucket
from bagua_hvd.training.model import Model

Peers = Callable[[int, int, int], Sequence[int]]


def exponential(round: int, rank: int, size: int) -> Sequence[int]:
    """i + 2^k."""
    return [(rank + 2 ** (round % (size - 1).bit_length())) % size] if size > 1 else []


class PushSum(LocalSteps):
    """Averages weights by push-sum instead of gradients.

    Args:
        peers: function of (round, rank, size) that returns the ranks which `rank` sends to in a round, from 0 on; it is
            called for this rank only. There may be none, where links are known to be down. Together, over some rounds,
            they must connect every rank with every other one. Default: exponential().
        hierarchical: hosts are the peers, numbered in the order of their first ranks; `peers` is asked for them.
        communication_interval, warmup_steps, full_steps: see LocalSteps.
    """

    uses_weights = ("after_step",)

    def __init__(self, peers: Peers = exponential, communication_interval: int = 1, warmup_steps: float = 0,
                 hierarchical: bool = False, full_steps: int | None = None) -> None:
        super().__init__(communication_interval, warmup_steps, full_steps)
        if not callable(peers):
            raise TypeError(f"peers={peers!r:.100}: expected a function of (round, rank, size)")
        self.peers = peers
        self.hierarchical = hierarchical

    def after_step(self, model: Model) -> None:
        if not self.ends_interval(model):
            return
        group = model.group
        hosts = hosts_of(group) if self.hierarchical else [[rank] for rank in range(group.size())]
        place = next(place for place, members in enumerate(hosts) if group.rank() in members)
        peers = self._peers((model.step - self.warmup_steps) // self.communication_interval, place, len(hosts))
        for pushed in [self._push(bucket, group, hosts, place, peers) for bucket in model.weights]:
            pushed.wait()

    def _peers(self, round: int, place: int, size: int) -> list[int]:
        peers = [int(peer) for peer in self.peers(round, place, size)]
        if not are_peers(peers, place, size):
            raise ValueError(f"peers={peers} of {place} in round {round}: expected numbers from 0 to {size - 1}, each "
                             f"once, and not {place}")
        return peers

    @exchange
    def _push(self, bucket: Bucket, group: ProcessSet, hosts: list[list[int]], place: int, peers: list[int]) -> Steps:
        z = bucket.read(tail=1)
        z[-1] = 1
        x: np.ndarray = bucket.state.keep("x", z.copy, fits=lambda kept: kept.size == z.size)   # its last element is w
        x[:-1] += z[:-1] - x[:-1] / x[-1]

        several = any(len(members) > 1 for members in hosts)
        first, *others = hosts[place]
        is_first = group.rank() == first
        if several:
            pushed = push(x, group, [] if is_first else [first], f"{bucket.name}.gather")
            yield pushed
            x += pushed.wait().sum(axis=0)
        to = [hosts[peer][0] for peer in peers] if is_first else []
        x /= 1 + len(to)
        pushed = push(x, group, to, f"{bucket.name}.push")
        yield pushed
        x += pushed.wait().sum(axis=0)
        if several:
            x /= 1 + len(others)
            pushed = push(x, group, others if is_first else [], f"{bucket.name}.spread")
            yield pushed
            if not is_first:
                x[:] = pushed.wait()[0]
        bucket.write(x[:-1] / x[-1])
