"""QAdam: Adam whose momentum travels as bytes once its variance has settled.

Warm-up, the first warmup_steps steps: gradients are averaged, and the user's Adam makes its step. From then on v is
frozen, and with the gradient g_i of rank i (weight decay lambda x added to it, unless decoupled)

    m_i = beta1 m + (1 - beta1) g_i
    m   = C_LP_S(m_i)                               8 bits; the same on all ranks
    x   = x - gamma / (1 - beta1^t) m / (sqrt(v) / sqrt(1 - beta2^T) + eps)

where t counts all updates and T those before v was frozen. An element's step m / (1 - beta1^t) / (...) is cut to
[-c, c], c = max(1, (1 - beta1) / sqrt(1 - beta2)), at m_i and at m: no step of Adam's own is longer. Decoupled weight
decay (AdamW): x = x - gamma lambda x before. Where v = 0, an element has had no gradient in the warm-up (a row of an
embedding that was never used): m stays 0 there, or the division by sqrt(v) would blow up its first gradient.

Wire after the warm-up: 2 N (n-1)/n bytes, as ByteGrad.
Memory: none beyond Adam's, but 12 N bytes during a step.
Source: Tang et al. (1-bit Adam), arXiv:2102.02888; BAGUA, arXiv:2107.01499.  Differs from BAGUA's: weight decay goes
on after the warm-up; v's bias correction is frozen with v, or the steps would grow; the gradient of step T is not
lost; m is 0 where v is; steps are bounded, since an element with hardly a gradient in the warm-up makes steps of
hundreds of learning rates as soon as it has one (bounded=False: it may).
"""
import numpy as np

from bagua_hvd.algorithms.base import Algorithm, Safety, positive
from bagua_hvd.job.process_sets import ProcessSet
from bagua_hvd.primitives import c_fp_s, c_lp_s, minmax_uint8
from bagua_hvd.training.adam import AdamMember, FlatAdam
from bagua_hvd.training.buckets import Bucket
from bagua_hvd.training.model import Model
from bagua_hvd.training.source import Pending


class QAdam(Algorithm):
    """Adam with 8-bit momentum. For Adam and AdamW without amsgrad, maximize or fused; gradients must be dense.

    Args:
        hierarchical: full precision within hosts, codes between them.
        warmup_steps: T, steps of plain Adam, 1 or more; about a fifth of all. None: that of the optimizer, if it has
            such an attribute (hvd.QAdamOptimizer), else 100.
        bounded: no element makes a longer step than any of Adam's own. False: as published.
    """

    safety = Safety.E2
    counts_steps = True
    dense_only = True
    uses_weights: tuple[str, ...] = ("communicate", "step")     # weight decay
    uses_adam = True
    replaces_step = True
    codec = minmax_uint8
    default_warmup_steps = 100      # where neither the script nor the optimizer says

    def __init__(self, hierarchical: bool = True, warmup_steps: int | None = None, bounded: bool = True) -> None:
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

    def gradients_travel(self, model: Model) -> bool:
        # A GradScaler multiplies gradients until it unscales them, just before the step: momenta have to wait for that.
        return not self.frozen(model) or not model.scaled

    def takes(self, dtype: int) -> bool:
        return self.codec.takes(dtype)

    def communicate(self, bucket: Bucket, group: ProcessSet) -> Pending:
        return self._begin(bucket, bucket.read()) if self.frozen(bucket.model) else c_fp_s(bucket, group)

    def _begin(self, bucket: Bucket, g: np.ndarray) -> Pending:
        """Posts m_i of a bucket."""
        adam = FlatAdam(bucket)
        p = self.preconditioner(adam, self._frozen_for(bucket.model))
        bucket.model.pending[bucket.name] = adam, p
        x = adam.weights() if any(member.weight_decay for member, _ in adam.members) else None
        for member, part in adam.members:
            if x is not None and member.weight_decay and not member.decoupled:
                g[part] += member.weight_decay * x[part]
            adam.m[part] = member.beta1 * adam.m[part] + (1 - member.beta1) * g[part]
        adam.m[adam.v == 0] = 0
        self.bound(adam, p)
        return self.exchange(bucket, adam.m, p)

    def preconditioner(self, adam: FlatAdam, frozen_for: int) -> np.ndarray:
        """sqrt(v) / sqrt(1 - beta2^T) + eps, flat. Keras means (sqrt(v) + eps) / sqrt(1 - beta2^T)."""
        p: np.ndarray = np.sqrt(adam.v)
        for member, part in adam.members:
            correction = np.sqrt(1 - member.beta2**(member.step - frozen_for))
            p[part] = p[part] / correction + (member.eps / correction if member.eps_corrected else member.eps)
        return p

    def bound(self, adam: FlatAdam, p: np.ndarray) -> None:
        """Cuts m to what makes the longest step."""
        for member, part in adam.members if self.bounded else ():
            longest = (1 - member.beta1 ** (member.step + 1)) * member.longest_step * p[part]
            np.clip(adam.m[part], -longest, longest, out=adam.m[part])

    def exchange(self, bucket: Bucket, m: np.ndarray, p: np.ndarray) -> Pending:
        """Begins m <- C_LP_S(m)."""
        return c_lp_s(m, bucket.model.group, codec=self.codec, name=bucket.name, hierarchical=self.hierarchical)

    def step(self, model: Model) -> bool:
        if not self.frozen(model):
            return False
        if not model.pending:
            for operation in [self._begin(bucket, bucket.flat(bucket.gradients)) for bucket in model.gradients]:
                operation.wait()
        for bucket in model.gradients:
            adam, p = model.pending[bucket.name]
            x = adam.weights()
            adam.m = self.received(adam.m, p)
            adam.m[adam.v == 0] = 0     # again: some codecs have no 0
            self.bound(adam, p)
            for member, part in adam.members:
                x[part] -= self.update(member, adam.m[part], p[part], x[part])
            adam.save(x)
        return True

    def received(self, m: np.ndarray, p: np.ndarray) -> np.ndarray:
        """m as the optimizer keeps it."""
        return m

    def update(self, member: AdamMember, m: np.ndarray, p: np.ndarray, x: np.ndarray) -> np.ndarray:
        """What is taken from x."""
        update: np.ndarray = member.lr / (1 - member.beta1 ** (member.step + 1)) * m / p
        return update + member.lr * member.weight_decay * x if member.decoupled else update
