"""AsyncDecentralized: in the background, the mean with one peer, or with both neighbours in a ring.

    in pairs        x_i += (s_i + s_p) / 2 - s_i                        p: the peer of this round (decentralized.py)
    ring            x_i += (s_i + s_left + s_right) / 3 - s_i

s_i: the weights when the round began (asynchronous.py). In pairs each rank goes from peer to peer at its own pace; with
max_staleness=None it does not stay with one that is late, but meets others meanwhile (meetings.py). In a ring a rank
waits for both neighbours.

hierarchical: hosts are the peers, with the mean of their ranks' s in place of s_i + ..., each counted for its ranks.
The ranks of a host go the same way together, and so do hosts: the rounds are those of all ranks (asynchronous.py), and
a late rank delays the next one; but not the training.

Wire per round: in pairs N elements, ring 2 N.
Memory: 2 N elements during a round, and for each peer that is late.
Source: Lian et al. (AD-PSGD), arXiv:1710.06952. Differs: peers in turn.
"""
from functools import partial

from bagua_hvd.algorithms.asynchronous import AnyRounds, Asynchronous
from bagua_hvd.algorithms.decentralized import PAIRS, cycle, round_of
from bagua_hvd.algorithms.exchange import Exchange, Steps, exchange
from bagua_hvd.algorithms.meetings import Meetings
from bagua_hvd.algorithms.replicas import host_count, require_peers
from bagua_hvd.job.process_sets import ProcessSet
from bagua_hvd.primitives import d_fp_s
from bagua_hvd.training.buckets import Bucket
from bagua_hvd.training.model import Model
from bagua_hvd.training.state import State

MODES = (*PAIRS, "ring")


@exchange
def to_average(group: ProcessSet, topology: str, bucket: Bucket, round: int, place: int,
               hierarchical: bool = False) -> Steps:
    """The average with this round's peers - s_i; place: of the memory."""
    s = bucket.read(workspace=f"snapshot.{place}")
    average = bucket.workspace(f"average.{place}", s.size, s.dtype)
    yield d_fp_s(s, group, topology=topology, round=round, out=average, hierarchical=hierarchical,
                 name=f"{bucket.name}.{round}")
    average -= s
    return average


class AsyncDecentralized(Asynchronous):
    """Averages weights with peers in the background.

    Args:
        peer_selection_mode: "shift_one", "exponential", "random" or "ring".
        hierarchical: hosts are the peers, each with the mean of its ranks.
        sync_interval_ms, warmup_steps, max_staleness, kappa: see Asynchronous.
    """

    def __init__(self, peer_selection_mode: str = "shift_one", sync_interval_ms: float = 0, warmup_steps: float = 0,
                 max_staleness: int | None = None, hierarchical: bool = False, kappa: int | None = None) -> None:
        super().__init__(sync_interval_ms, warmup_steps, max_staleness, kappa)
        if peer_selection_mode not in MODES:
            raise ValueError(f"peer_selection_mode={peer_selection_mode!r}: expected one of {', '.join(MODES)}")
        self.peer_selection_mode = peer_selection_mode
        self.hierarchical = hierarchical

    def prepare(self, model: Model) -> None:
        require_peers(model.group, f"async with peer_selection_mode={self.peer_selection_mode!r}")
        super().prepare(model)

    def rounds_of(self, model: Model) -> AnyRounds:
        mode = self.peer_selection_mode
        if mode == "ring" or self.hierarchical:
            return super().rounds_of(model)
        topology, rounds = cycle(mode, model.group.size())
        begin = partial(to_average, model.group, topology)
        return Meetings(model, begin, topology, rounds, in_order=mode != "random")

    def difference(self, bucket: Bucket, group: ProcessSet, number: int, state: State) -> Exchange:
        if self.peer_selection_mode == "ring":
            return to_average(group, "ring", bucket, 0, 0, self.hierarchical)
        topology, round = round_of(self.peer_selection_mode, host_count(group), number)
        return to_average(group, topology, bucket, round, 0, hierarchical=True)
