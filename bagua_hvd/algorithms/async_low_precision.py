"""AsyncLowPrecision: in the background, the mean of all weights, by codes of how far they are from the last one.

    d_i = s_i - y
    y  += mean_i D(Q(d_i))
    x_i += y - s_i + (d_i - D(Q(d_i)))

s_i: the weights when the round began (asynchronous.py); y: where all stood after the last round, equal everywhere. What
Q loses of d_i stays in x_i. hierarchical: what it loses of a host's mean stays with the member that has encoded it.

Wire per round: 2 N (n-1)/n elements of the codec; with minmax_uint8 bytes.
Memory: 2 N elements during a round, N more always.
Source: as async_mean.py, with the differences of error feedback (doublesqueeze.py).
"""
import numpy as np

from bagua_hvd.algorithms.asynchronous import Asynchronous
from bagua_hvd.algorithms.averaging import Mean
from bagua_hvd.algorithms.base import blocks
from bagua_hvd.algorithms.exchange import Steps, exchange
from bagua_hvd.codecs import Codec
from bagua_hvd.job.process_sets import ProcessSet
from bagua_hvd.primitives import ErrorState, c_lp_s, minmax_uint8
from bagua_hvd.training.buckets import Bucket
from bagua_hvd.training.state import State


class AsyncLowPrecision(Asynchronous):
    """Averages weights by 8-bit differences in the background.

    Args:
        codec: of bagua_hvd.primitives.
        hierarchical: full precision within hosts, codes between them.
        sync_interval_ms, warmup_steps, max_staleness, kappa: see Asynchronous.
    """

    def __init__(self, sync_interval_ms: float = 0, warmup_steps: float = 0, codec: Codec = minmax_uint8,
                 max_staleness: int | None = None, hierarchical: bool = False, kappa: int | None = None) -> None:
        super().__init__(sync_interval_ms, warmup_steps, max_staleness, kappa)
        self.codec = codec
        self.hierarchical = hierarchical

    @exchange
    def difference(self, bucket: Bucket, group: ProcessSet, number: int, state: State) -> Steps:
        y: np.ndarray = state.keep("y", lambda: Mean(bucket, group, f"{bucket.name}.first").wait().copy())
        error = ErrorState(bucket.count, group.size(), self.hierarchical)
        error.server = state.keep("server_error", lambda: error.server)
        d = bucket.read(workspace="difference")
        d -= y
        mean = bucket.workspace("mean of differences", bucket.count, d.dtype)
        yield c_lp_s(d, group, codec=self.codec, error=error, out=mean, name=bucket.name, seed=bucket.seed(number),
                     hierarchical=self.hierarchical)
        for part in blocks(mean.size):
            y[part] += mean[part]
            mean[part] -= d[part]
            mean[part] += error.worker[part]
        return mean
