"""Local Adam: every rank steps by itself; now and then all take the mean of weights, of momenta, and of variances.

    m_i <- beta1 m_i + (1 - beta1) g_i              v_i <- beta2 v_i + (1 - beta2) g_i^2
    x_i <- x_i - gamma m_i^ / (sqrt(v_i^) + eps)    Adam's step, or AdamW's, with bias corrected m_i^ and v_i^
    x_i <- (1/n) sum_j x_j                          after every H-th local step
    m_i <- (1/n) sum_j m_j                          after every H_m-th
    v_i <- (1/n) sum_j v_j                          after every H_v-th

H_m = H_v = H, the default, is Local Adam. Momenta and variances change the more slowly the nearer their beta is to 1:
so they may meet more rarely, as in DES-LOC, whose paper has H_m = 3 H and H_v = 6 H.

Wire: 2 N (n-1)/n (1/H + 1/H_m + 1/H_v) elements per step.
Memory: 3 N elements during the averaging.
Source: Cheng and Glasgow (Local Adam), arXiv:2409.13155; Iacob et al. (DES-LOC), arXiv:2505.22549.  Differs: states are
averaged after a step, not before the next one; some steps are exact (full_steps.py; full_steps=0: none).

Limits: v_i is made of one rank's gradients, and holds n times the noise of their mean, which averaging does not take
out (decision 51): local_sgd, which lets full steps say what v is, did better for a third of the bytes. And where data
differ much, H_v > H_m can diverge: others' momentum is divided by the variance of a rank that saw no such gradients.
"""
import numpy as np

from bagua_hvd.algorithms.base import positive
from bagua_hvd.algorithms.local import LocalSteps
from bagua_hvd.core.operations import Posted
from bagua_hvd.primitives import c_fp_s
from bagua_hvd.training.adam import FlatAdam
from bagua_hvd.training.buckets import Bucket
from bagua_hvd.training.model import Model


class LocalAdam(LocalSteps):
    """Averages weights and the state of Adam or AdamW now and then; optimizers as for Lamb.

    Args:
        communication_interval: H, optimizer steps from one averaging of weights to the next, 1 or more. By default as
            many as let it send what local_sgd sends with 4.
        momentum_interval, variance_interval: H_m, H_v. None: H.
        warmup_steps, full_steps: see LocalSteps.
    """

    dense_only = True
    uses_weights = ("step",)
    uses_adam = True
    replaces_step = True

    def __init__(self, communication_interval: int = 12, momentum_interval: int | None = None,
                 variance_interval: int | None = None, warmup_steps: float = 0, full_steps: int | None = None) -> None:
        super().__init__(communication_interval, warmup_steps, full_steps)
        H = self.communication_interval
        self.momentum_interval = positive("momentum_interval", H if momentum_interval is None else momentum_interval)
        self.variance_interval = positive("variance_interval", H if variance_interval is None else variance_interval)
        self.shares_variance = False

    def prepare(self, model: Model) -> None:
        model.adam()

    def step(self, model: Model) -> bool:
        local = model.step + 1 - self.warmup_steps
        intervals = {"x": self.communication_interval, "m": self.momentum_interval, "v": self.variance_interval}
        due = [name for name, interval in intervals.items() if local > 0 and local % interval == 0]
        if not due:
            return False            # Adam's own
        begun = [self._begin(bucket, due) for bucket in model.gradients]
        for adam, values, sent, operation in begun:
            operation.wait()
            for name, mean in zip(due, np.split(sent[:-1] / sent[-1], len(due)), strict=True):
                values[name][:] = mean
            adam.save(values["x"], variance=True)
        return True

    def _begin(self, bucket: Bucket, due: list[str]) -> tuple[FlatAdam, dict[str, np.ndarray], np.ndarray, Posted]:
        """Makes Adam's step; (its state, x_i, m_i and v_i after it, what is sent of them, how it becomes the sum)."""
        adam = FlatAdam(bucket, begin=True)
        x = adam.weights()
        adam.moments(bucket.flat(bucket.gradients), x)
        u = adam.direction(adam.denominator(), x)
        for member, part in adam.members:
            x[part] -= member.lr * u[part]
        values = {"x": x, "m": adam.m, "v": adam.v}
        sent: np.ndarray = np.concatenate([*(values[name] for name in due), [1]], dtype=x.dtype)    # join(): a 0
        return adam, values, sent, c_fp_s(sent, bucket.model.group, average=False, name=bucket.name)
