"""Async: in the background, the mean of all weights.

    x_i += (1/n) sum_j s_j - s_i                s_i: the weights when the round began (asynchronous.py)

Wire per round: 2 N (n-1)/n elements.
Memory: 2 N elements during a round.
Source: BAGUA, arXiv:2107.01499. Its class takes the other ways of averaging as arguments, too.
"""
from bagua_hvd.algorithms.async_decentralized import MODES as PEERS
from bagua_hvd.algorithms.async_decentralized import AsyncDecentralized
from bagua_hvd.algorithms.async_low_precision import AsyncLowPrecision
from bagua_hvd.algorithms.async_low_precision_decentralized import AsyncLowPrecisionDecentralized
from bagua_hvd.algorithms.asynchronous import AnyRounds, Asynchronous
from bagua_hvd.algorithms.averaging import Mean
from bagua_hvd.algorithms.decentralized import PAIRS
from bagua_hvd.algorithms.exchange import Exchange, Steps, exchange
from bagua_hvd.codecs import Codec
from bagua_hvd.job.process_sets import ProcessSet
from bagua_hvd.training.buckets import Bucket
from bagua_hvd.training.model import Model
from bagua_hvd.training.state import State

MODES = ("all", *PEERS)


@exchange
def to_mean(bucket: Bucket, group: ProcessSet) -> Steps:
    """(1/n) sum_j s_j - s_i"""
    mean = Mean(bucket, group)
    yield mean.operation
    return mean.difference()


class Async(Asynchronous):
    """Averages weights in the background.

    Args:
        peer_selection_mode: "all", or "shift_one", "exponential", "random" or "ring": see async_decentralized.py.
        codec: of bagua_hvd.primitives, for differences instead of weights: see async_low_precision.py (all) and
            async_low_precision_decentralized.py (ring); None: full precision. Not with pairs.
        hierarchical: of these; for all without codec it changes nothing but the way that the bytes take.
        sync_interval_ms, warmup_steps, max_staleness, kappa: see Asynchronous.
    """

    def __init__(self, peer_selection_mode: str = "all", sync_interval_ms: float = 0, warmup_steps: float = 0,
                 codec: Codec | None = None, max_staleness: int | None = None, hierarchical: bool = False,
                 kappa: int | None = None) -> None:
        super().__init__(sync_interval_ms, warmup_steps, max_staleness, kappa)
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
        self._other: AsyncDecentralized | AsyncLowPrecision | AsyncLowPrecisionDecentralized | None = None
        if codec is None and peer_selection_mode != "all":
            self._other = AsyncDecentralized(peer_selection_mode)
        elif codec is not None:
            coded = AsyncLowPrecision if peer_selection_mode == "all" else AsyncLowPrecisionDecentralized
            self._other = coded(codec=codec)

    def prepare(self, model: Model) -> None:
        if self._other is not None:
            self._other.hierarchical = self.hierarchical    # which BAGUA_HIERARCHY=0 has changed since
            self._other.prepare(model)
        super().prepare(model)

    def rounds_of(self, model: Model) -> AnyRounds:
        return super().rounds_of(model) if self._other is None else self._other.rounds_of(model)

    def difference(self, bucket: Bucket, group: ProcessSet, number: int, state: State) -> Exchange:
        return to_mean(bucket, group) if self._other is None else self._other.difference(bucket, group, number, state)
