"""AsyncLowPrecisionDecentralized: in the background, the mean with both neighbours in a ring, by codes.

    W += D(Q(s_i - W))          and on the neighbours, from the same bytes: R += D(Q(..)), L += D(Q(..))
    x_i += (L + R - 2 W) / 3

s_i: the weights when the round began (asynchronous.py); W, L, R: replicas of this rank and its neighbours, as in
choco.py with gamma = 1. hierarchical: hosts stand in the ring; in place of s_i is h, the mean of a host's ranks:

    W += D(Q(h - W))
    x_i += h - s_i + (L + R - 2 W) / 3

Wire per round: 2 N elements of the codec; with minmax_uint8 bytes.
Memory: 2 N elements during a round, 3 N float32 more always.
Source: as async_decentralized.py and low_precision_decentralized.py.
"""
import numpy as np

from bagua_hvd.algorithms.asynchronous import Asynchronous
from bagua_hvd.algorithms.exchange import Steps, exchange
from bagua_hvd.algorithms.replicas import replicas_of, require_peers
from bagua_hvd.codecs import Codec
from bagua_hvd.job.process_sets import ProcessSet
from bagua_hvd.primitives import d_lp_s, minmax_uint8
from bagua_hvd.training.buckets import Bucket
from bagua_hvd.training.model import Model
from bagua_hvd.training.state import State


class AsyncLowPrecisionDecentralized(Asynchronous):
    """Averages weights with the neighbours on a ring by 8-bit differences in the background.

    Args:
        codec: of bagua_hvd.primitives.
        hierarchical: hosts are the neighbours, each with the mean of its ranks; one of fewer ranks than this counts for
            less (primitives.d_lp_s), so that the mean over all ranks stays.
        sync_interval_ms, warmup_steps, max_staleness, kappa: see Asynchronous.
    """

    def __init__(self, sync_interval_ms: float = 0, warmup_steps: float = 0, codec: Codec = minmax_uint8,
                 max_staleness: int | None = None, hierarchical: bool = False, kappa: int | None = None) -> None:
        super().__init__(sync_interval_ms, warmup_steps, max_staleness, kappa)
        self.codec = codec
        self.hierarchical = hierarchical

    def prepare(self, model: Model) -> None:
        require_peers(model.group, "async with peer_selection_mode='ring'")
        super().prepare(model)

    @exchange
    def difference(self, bucket: Bucket, group: ProcessSet, number: int, state: State) -> Steps:
        replicas = replicas_of(bucket, group, self.hierarchical, state)
        delta = bucket.workspace("delta", bucket.count, np.float32)
        d = bucket.read(workspace="difference")
        d -= replicas.own
        delta[:] = d
        yield d_lp_s(delta, group, self.codec, replicas, name=bucket.name, seed=bucket.seed(number),
                     hierarchical=self.hierarchical, after=(1, -2 / 3, 1 / 3, 1 / 3))
        delta -= d
        return delta
