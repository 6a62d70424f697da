"""DoubleSqueeze: ByteGrad with error feedback on both passes, with momentum, and with full steps; for any codec.

Rank i of n holds the bucket g_i, its error e_i, and the error f_k of the chunk k that it owns (k = i):

    m_i <- mu m_i + g_i                         mu = 0: the gradient itself
    v_i = m_i + e_i                             e_i <- v_i - D(Q(v_i))
    u   = mean_i D(Q(v_i))[k] + f_k             f_k <- u - D(Q(u))
    g   = concat_k D(Q(u))                      in full steps (full_steps.py): g = mean_i m_i

Encoding errors are sent in the next steps, so biased codecs such as sign also converge. With mu > 0, leave out the
optimizer's own momentum: momentum before the codec smooths the encoded values, after it sums up the codec's noise.

Codecs that withhold whole elements (top-k) send all their errors in every other full step after the warm-up:

    g   = mean_i v_i,  e_i <- 0                 not usable for Adam's variance, so full_step() excludes these steps

Wire: two codes of N (n-1)/n elements; with sign N/4 bytes.
State: 4 (N + N/n) bytes, with momentum 4 N more; in the optimizer's state_dict.
Source: Tang et al., arXiv:1905.05957.
"""
from typing import Any

import numpy as np

from bagua_hvd.algorithms.base import Safety, fraction, without_loss
from bagua_hvd.algorithms.bytegrad import ByteGrad
from bagua_hvd.algorithms.full_steps import FullSteps, codec_for, count, is_full, mean_of_gradients
from bagua_hvd.codecs import Codec
from bagua_hvd.job.process_sets import ProcessSet
from bagua_hvd.primitives import sign
from bagua_hvd.training.buckets import Bucket
from bagua_hvd.training.model import Model


class DoubleSqueeze(FullSteps, ByteGrad):
    """Averages gradients through a codec, and sends its errors in the next step.

    Args:
        codec: from bagua_hvd.codecs; sign: one bit per element.
        momentum: mu, 0 <= mu < 1.
        warmup_steps, full_steps: see FullSteps.
        average: False for the sum.
        hierarchical: full precision within hosts, codes between them.
    """

    safety = Safety.E2
    remembers_gradients = True
    empties_errors = False

    def __init__(self, codec: Codec = sign, momentum: float = 0.0, warmup_steps: float = 0, average: bool = True,
                 hierarchical: bool = True, full_steps: int | None = None) -> None:
        ByteGrad.__init__(self, hierarchical, average, True, codec)
        FullSteps.__init__(self, warmup_steps, full_steps)
        self.counts_steps |= codec.random
        self.momentum = fraction("momentum", momentum)

    @property
    def runs_alone(self) -> bool:
        return self.momentum > 0

    def full_step(self, model: Model | None) -> bool:
        return super().full_step(model) and not self.empties(model)

    def empties(self, model: Model | None) -> bool:
        """Whether this step also sends everything that the codec has withheld; the same on all ranks."""
        return (self.empties_errors and model is not None and model.step >= self.warmup_steps
                and is_full(model.step, self.full_steps) and count(model.step, self.full_steps) % 2 == 0)

    def communicate(self, bucket: Bucket, group: ProcessSet) -> Any:
        if self.full_step(bucket.model):
            self._add_momentum(bucket)
            return mean_of_gradients(bucket, group, self.average)
        if self.empties(bucket.model):
            return self._by(codec_for(bucket) or without_loss(bucket), bucket, group)
        return super().communicate(bucket, group)

    def _add_momentum(self, bucket: Bucket) -> None:
        if self.momentum:
            gradient = bucket.read()
            m = bucket.state.zeros_like("momentum", gradient, scaled=True)
            # A further backward pass before the step has added its gradients to the reduced ones, mean_i m_i.
            moved = gradient if bucket.model and bucket.model.continues else self.momentum * m + gradient
            bucket.write(moved)
            if np.isfinite(moved).all():        # else m stays non-finite after loss scaling skips the step
                m[:] = moved

    def _by(self, codec: Codec, bucket: Bucket, group: ProcessSet) -> Any:
        self._add_momentum(bucket)
        return super()._by(codec, bucket, group)
