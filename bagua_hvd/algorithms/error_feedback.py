"""What algorithms with error feedback share: local momentum, exact steps, the memory of errors.

    m_i <- mu m_i + g_i                         mu = 0: the gradient itself
    g   = mean_i m_i                            in the exact steps (exact_steps.py; of codes of 8 bits)
    g   = C_LP_S(m_i; Q, e_i, f_k)              in the others

    g   = mean_i m_i + e_i,  e_i <- 0           empties_errors: in every other exact step after the warm-up (but for
                                                what those codes lose)

The last is for codecs that let whole elements wait, and them long: with top-k and 3 %, 33 steps of those that all
take part in. It costs no bytes. But such a step says nothing of Adam's variance: exact() leaves it out.

With mu > 0 leave the optimizer's own momentum out: mean_i m_i is then what momentum SGD would have made of the mean
gradient. The order matters: an optimizer's momentum adds up the codec's noise; momentum before the codec does not, and
smooths what the codec has to encode.
"""
from typing import Any

import numpy as np

from bagua_hvd.algorithms.base import Safety, error_state, without_loss
from bagua_hvd.algorithms.exact_steps import ExactSteps, codec_for, count, is_exact, mean_of_gradients
from bagua_hvd.codecs import Codec
from bagua_hvd.job.process_sets import ProcessSet
from bagua_hvd.primitives import c_lp_s
from bagua_hvd.training.buckets import Bucket
from bagua_hvd.training.model import Model
from bagua_hvd.tuning.cost import Cost, Ranks, coded


class ErrorFeedback(ExactSteps):
    """Averages gradients through a codec, and sends what it lost in the next step.

    Args:
        codec: of bagua_hvd.primitives. exchange: of c_lp_s().
        momentum: mu, 0 <= mu < 1.
        warmup_steps, kappa: see ExactSteps.
        average: False for the sum.
        hierarchical: full precision within hosts, codes between them.
    """

    safety = Safety.E2
    remembers_gradients = True
    empties_errors = False

    def __init__(self, codec: Codec, exchange: Any, momentum: float = 0.0, warmup_steps: float = 0,
                 average: bool = True, hierarchical: bool = False, kappa: int | None = None) -> None:
        super().__init__(warmup_steps, kappa)
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum={momentum!r}: expected 0 <= momentum < 1")
        self.codec = codec
        self.exchange = exchange
        self.momentum = momentum
        self.average = average
        self.hierarchical = hierarchical

    @property
    def runs_alone(self) -> bool:
        return self.momentum > 0

    def takes(self, dtype: int) -> bool:
        return self.codec.takes(dtype)

    def exact(self, model: Model | None) -> bool:
        return super().exact(model) and not self.empties(model)

    def empties(self, model: Model | None) -> bool:
        """Whether this step sends, beside gradients, all that codes have withheld; the same on all ranks."""
        return (self.empties_errors and model is not None and model.step >= self.warmup_steps
                and is_exact(model.step, self.kappa) and count(model.step, self.kappa) % 2 == 0)

    def communicate(self, bucket: Bucket, group: ProcessSet) -> Any:
        if self.empties(bucket.model):
            return self._by(codec_for(bucket) or without_loss(bucket), "scatter_gather", bucket, group)
        return self._by(self.codec, self.exchange, bucket, group)

    def leave(self, bucket: Bucket, group: ProcessSet) -> Any:
        return self._by(without_loss(bucket), "scatter_gather", bucket, group)

    def cost(self, elements: int, dtype: int, ranks: Ranks) -> Cost:
        return coded(self.codec, elements, dtype, ranks, self.hierarchical, self.exchange, error_feedback=True)

    def _by(self, codec: Codec, exchange: Any, bucket: Bucket, group: ProcessSet) -> Any:
        if self.momentum:
            gradient = bucket.read()
            m = bucket.state.zeros_like("momentum", gradient, scaled=True)
            # A further pass before the step has added its gradients to the mean of what was sent: to mean_i m_i.
            moved = gradient if bucket.model and bucket.model.continues else self.momentum * m + gradient
            bucket.write(moved)
            if np.isfinite(moved).all():        # or it would stay so, when loss scaling has skipped the step
                m[:] = moved
        if self.exact(bucket.model):
            return mean_of_gradients(bucket, group, self.average)
        error = error_state(bucket, group, self.hierarchical)
        return c_lp_s(
            bucket, group, codec=codec, error=error, average=self.average,
            exchange=exchange, hierarchical=self.hierarchical, seed=bucket.seed(bucket.step),
        )
