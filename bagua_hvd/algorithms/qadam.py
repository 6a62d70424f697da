"""QAdam: sends Adam's momentum as bytes, once the variance has settled.

In the warm-up, the first warmup_steps steps, gradients are averaged as in full steps (full_steps.py), and the user's
Adam makes its step. Then v is frozen, and with the gradient g_i of rank i (plus weight decay lambda x, unless
decoupled)

    m_i = beta1 m + (1 - beta1) g_i
    m   = C_LP_S(m_i)                               8 bits; the same on all ranks
    x   = x - gamma / (1 - beta1^t) m / (sqrt(v) / sqrt(1 - beta2^T) + eps)

where t counts all updates and T those before v was frozen. An element's step m / (1 - beta1^t) / (...) is clipped to
[-c, c], c = max(1, (1 - beta1) / sqrt(1 - beta2)), for m_i and for m: Adam itself never makes a longer step. Decoupled
weight decay (AdamW): x = x - gamma lambda x before. v = 0 for an element without gradients in the warm-up (an
embedding row that was never used): there m stays 0, or the division by sqrt(v) would blow up its first gradient.

Wire after the warm-up: 2 N (n-1)/n bytes, as ByteGrad.
Memory: 4 N bytes beyond Adam's, of values in flight.
Source: Tang et al. (1-bit Adam), arXiv:2102.02888; BAGUA, arXiv:2107.01499.  Differs from BAGUA's: weight decay goes
on after the warm-up; v's bias correction is frozen with v, or the steps would grow; the gradient of step T is not
lost; m is 0 where v is; steps are bounded, since an element with tiny gradients in the warm-up would later make
steps of hundreds of learning rates (bounded=False: not bounded).
"""
from collections.abc import Sequence

from bagua_hvd.algorithms.base import Algorithm, Safety, error_state, positive, valid_codec
from bagua_hvd.algorithms.full_steps import mean_of_gradients
from bagua_hvd.codecs import Codec
from bagua_hvd.core.native import TensorView
from bagua_hvd.job.process_sets import ProcessSet
from bagua_hvd.primitives import c_lp_s, minmax_uint8
from bagua_hvd.training import adam
from bagua_hvd.training.buckets import Bucket
from bagua_hvd.training.model import Model
from bagua_hvd.training.source import Pending


class QAdam(Algorithm):
    """Adam with 8-bit momentum. For Adam and AdamW without amsgrad, maximize or fused; gradients must be dense.

    Args:
        hierarchical: full precision within hosts, codes between them.
        warmup_steps: T, steps of plain Adam, 1 or more; about a fifth of the training. None: the optimizer's attribute
            of this name (hvd.QAdamOptimizer), else 100.
        bounded: limit each element's step to the longest that Adam makes. False: as published.
        codec: from bagua_hvd.codecs, such as rotated(2). None: minmax_uint8.
    """

    safety = Safety.E2
    counts_steps = True
    dense_only = True
    uses_weights: tuple[str, ...] = ("communicate", "step")     # weight decay
    uses_adam = True
    replaces_step = True
    codec = minmax_uint8
    error_feedback = False
    in_steps = False                # whether m / (sqrt(v) / ... + eps) is sent, not m
    default_warmup_steps = 100      # if neither the script nor the optimizer sets it

    def __init__(self, hierarchical: bool = True, warmup_steps: int | None = None, bounded: bool = True,
                 codec: Codec | None = None) -> None:
        if codec is not None:
            self.codec = valid_codec(codec)
        self.hierarchical = hierarchical
        self.bounded = bounded
        self.warmup_steps = None if warmup_steps is None else positive("warmup_steps", warmup_steps)

    def prepare(self, model: Model) -> None:
        positive("warmup_steps", model.adam().warmup_steps or self.default_warmup_steps)

    def _frozen_for(self, model: Model) -> int:
        """Steps since the warm-up; negative within it."""
        return model.step - (self.warmup_steps or model.adam().warmup_steps or self.default_warmup_steps)

    def frozen(self, model: Model) -> bool:
        """Whether the warm-up is over."""
        return self._frozen_for(model) >= 0

    def communicates_gradients(self, model: Model) -> bool:
        # A GradScaler unscales gradients just before the step: momenta must wait for that.
        return not self.frozen(model) or not model.scaled

    def takes(self, dtype: int) -> bool:
        return self.codec.takes(dtype)

    def communicate(self, bucket: Bucket, group: ProcessSet) -> Pending:
        return self._begin(bucket, bucket.views) if self.frozen(bucket.model) else mean_of_gradients(bucket, group)

    def _begin(self, bucket: Bucket, gradients: Sequence[TensorView]) -> Pending:
        """Begins m <- C_LP_S(m_i) of a bucket."""
        m = adam.momentum(bucket, gradients, self._frozen_for(bucket.model), self.in_steps, self.bounded)
        bucket.model.pending[bucket.name] = m
        group, hierarchical = bucket.model.group, self.hierarchical
        error = error_state(bucket, group, hierarchical, scaled=False) if self.error_feedback else None
        return c_lp_s(m, group, self.codec, error, name=bucket.name, hierarchical=hierarchical,
                      seed=bucket.seed(bucket.step))

    def step(self, model: Model) -> bool:
        if not self.frozen(model):
            return False
        if not model.pending:
            for operation in [self._begin(bucket, bucket.gradients) for bucket in model.gradients]:
                operation.wait()
        for bucket in model.gradients:
            adam.step(bucket, model.pending[bucket.name], self._frozen_for(model), self.in_steps, self.bounded)
        return True
