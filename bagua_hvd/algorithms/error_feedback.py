"""What algorithms with error feedback share: local momentum, a warm-up in full precision, the memory of errors.

    m_i <- mu m_i + g_i                         mu = 0: the gradient itself
    g   = mean_i m_i                            in the first warmup_steps steps
    g   = C_LP_S(m_i; Q, e_i, f_k)              from then on

With mu > 0 leave the optimizer's own momentum out: mean_i m_i is then what momentum SGD would have made of the mean
gradient. The order matters: an optimizer's momentum adds up the codec's noise; momentum before the codec does not, and
smooths what the codec has to encode.
"""
from typing import Any

import numpy as np

from bagua_hvd.algorithms.base import Algorithm, error_state, not_negative
from bagua_hvd.codecs import Codec
from bagua_hvd.job.process_sets import ProcessSet
from bagua_hvd.primitives import c_fp_s, c_lp_s
from bagua_hvd.training.buckets import Bucket


class ErrorFeedback(Algorithm):
    """Averages gradients through a codec, and sends what it lost in the next step.

    Args:
        codec: of bagua_hvd.primitives. exchange: of c_lp_s().
        momentum: mu, 0 <= mu < 1.
        warmup_steps: steps in full precision before.
        average: False for the sum.
        hierarchical: full precision within hosts, codes between them.
    """

    remembers_gradients = True

    def __init__(self, codec: Codec, exchange: Any, momentum: float = 0.0, warmup_steps: float = 0,
                 average: bool = True, hierarchical: bool = False) -> None:
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum={momentum!r}: expected 0 <= momentum < 1")
        self.codec = codec
        self.exchange = exchange
        self.momentum = momentum
        self.warmup_steps = not_negative("warmup_steps", warmup_steps)
        self.average = average
        self.hierarchical = hierarchical
        self.counts_steps = warmup_steps > 0

    def takes(self, dtype: int) -> bool:
        return self.codec.takes(dtype)

    def communicate(self, bucket: Bucket, group: ProcessSet) -> Any:
        if self.momentum:
            gradient = bucket.read()
            m = bucket.state.zeros_like("momentum", gradient, scaled=True)
            # A further pass before the step has added its gradients to the mean of what was sent: to mean_i m_i.
            moved = gradient if bucket.model and bucket.model.continues else self.momentum * m + gradient
            bucket.write(moved)
            if np.isfinite(moved).all():        # or it would stay so, when loss scaling has skipped the step
                m[:] = moved
        if bucket.step < self.warmup_steps:
            return c_fp_s(bucket, group, average=self.average)
        error = error_state(bucket, group, self.hierarchical)
        return c_lp_s(
            bucket, group, codec=self.codec, error=error, average=self.average,
            exchange=self.exchange, hierarchical=self.hierarchical, seed=bucket.seed(bucket.step),
        )
