"""LAMB: Adam whose step each tensor scales by its own size, for large batches; gradients travel as they are.

With the mean gradient g, of each tensor's weights x

    m = beta1 m + (1 - beta1) g         v = beta2 v + (1 - beta2) g^2
    u = m / (1 - beta1^t) / (sqrt(v) / sqrt(1 - beta2^t) + eps) + lambda x
    c = min(max(||x|| / ||u||, c_min), c_max)           1 where a norm is 0
    x = x - gamma c u

The user's optimizer is Adam or AdamW, whose m, v and hyperparameters these are: so it is LAMB in every framework.
lambda is AdamW's weight decay; Adam's is added to g, as ever.

Wire: 2 N (n-1)/n elements.
Memory: none beyond Adam's, but 12 N bytes during a step.
Source: You et al., arXiv:1904.00962; the bounds of c, whose values are not there, as in 1-bit LAMB, arXiv:2104.06069.
"""
import numpy as np

from bagua_hvd.algorithms.base import Algorithm, Safety
from bagua_hvd.job.process_sets import ProcessSet
from bagua_hvd.primitives import c_fp_s
from bagua_hvd.training.adam import FlatAdam
from bagua_hvd.training.buckets import Bucket
from bagua_hvd.training.model import Model
from bagua_hvd.training.source import Pending


def ratio(x: np.ndarray, u: np.ndarray, lowest: float, highest: float) -> float:
    """c of a tensor. A NaN stays one."""
    of_x, of_u = float(np.linalg.norm(x)), float(np.linalg.norm(u))
    return 1.0 if of_x == 0 or of_u == 0 else float(np.clip(of_x / of_u, lowest, highest))


class Lamb(Algorithm):
    """LAMB, by the state of Adam or AdamW without amsgrad, maximize or fused; gradients must be dense.

    Args:
        c_min, c_max: bounds of c, 0 < c_min <= c_max.
    """

    safety = Safety.E0
    relaxed = False
    dense_only = True
    uses_weights = ("step",)
    uses_adam = True
    replaces_step = True

    def __init__(self, c_min: float = 0.01, c_max: float = 10.0) -> None:
        if not 0 < c_min <= c_max:
            raise ValueError(f"c_min={c_min!r}, c_max={c_max!r}: expected 0 < c_min <= c_max")
        self.c_min, self.c_max = c_min, c_max

    def prepare(self, model: Model) -> None:
        model.adam()

    def communicate(self, bucket: Bucket, group: ProcessSet) -> Pending:
        return c_fp_s(bucket, group)

    def step(self, model: Model) -> bool:
        for bucket in model.gradients:
            adam = FlatAdam(bucket, begin=True)
            x = adam.weights()
            adam.moments(bucket.flat(bucket.gradients), x)
            u = adam.direction(adam.denominator(), x)
            for member, part in adam.members:
                x[part] -= member.lr * ratio(x[part], u[part], self.c_min, self.c_max) * u[part]
            adam.save(x, variance=True)
        return True
