"""AsyncDecentralized: in the background, the mean with one peer, or with both neighbours in a ring.

    in pairs        x_i += (s_i + s_p) / 2 - s_i                        p: the peer of this round (decentralized.py)
    ring            x_i += (s_i + s_left + s_right) / 3 - s_i

s_i: the weights when the round began (asynchronous.py).

Wire per round: in pairs N elements, ring 2 N.
Memory: 2 N elements during a round.
Source: Lian et al. (AD-PSGD), arXiv:1710.06952. Differs: in rounds.
"""
from bagua_hvd.algorithms.asynchronous import Asynchronous
from bagua_hvd.algorithms.decentralized import PAIRS, meeting
from bagua_hvd.algorithms.exchange import Steps, exchange
from bagua_hvd.algorithms.replicas import require_peers
from bagua_hvd.job.process_sets import ProcessSet
from bagua_hvd.primitives import d_fp_s
from bagua_hvd.training.buckets import Bucket
from bagua_hvd.training.model import Model
from bagua_hvd.training.state import State

MODES = (*PAIRS, "ring")


class AsyncDecentralized(Asynchronous):
    """Averages weights with peers in the background.

    Args:
        peer_selection_mode: "shift_one", "exponential", "random" or "ring".
        sync_interval_ms, warmup_steps, max_staleness: see Asynchronous.
    """

    def __init__(self, peer_selection_mode: str = "shift_one", sync_interval_ms: float = 500, warmup_steps: float = 0,
                 max_staleness: int | None = None) -> None:
        super().__init__(sync_interval_ms, warmup_steps, max_staleness)
        if peer_selection_mode not in MODES:
            raise ValueError(f"peer_selection_mode={peer_selection_mode!r}: expected one of {', '.join(MODES)}")
        self.peer_selection_mode = peer_selection_mode

    def prepare(self, model: Model) -> None:
        require_peers(model.group, f"async with peer_selection_mode={self.peer_selection_mode!r}")
        super().prepare(model)

    @exchange
    def difference(self, bucket: Bucket, group: ProcessSet, number: int, state: State) -> Steps:
        s = bucket.read(workspace="snapshot")
        average = bucket.workspace("average", s.size, s.dtype)
        mode = self.peer_selection_mode
        topology, round = (mode, 0) if mode == "ring" else meeting(mode, group.size(), number)
        yield d_fp_s(s, group, topology=topology, round=round, out=average, name=f"{bucket.name}.{round}")
        average -= s
        return average
