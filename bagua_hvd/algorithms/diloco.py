"""DiLoCo: many local steps, then one step of an outer optimizer on how far they went.

theta is where all ranks stood after the last outer step. Every H steps of the user's (inner) optimizer:

    Delta = (1/n) sum_i (theta - x_i)
    m     = mu m + Delta
    theta = theta - eta (Delta + mu m)          Nesterov momentum
    x_i   = theta

Wire: 2 N (n-1)/n elements every H steps.
Memory: 2 N elements (theta and m), equal on all ranks.
Source: Douillard et al., arXiv:2311.08105.
"""
import functools

import numpy as np

from bagua_hvd.algorithms.averaging import Mean
from bagua_hvd.algorithms.local import LocalSteps
from bagua_hvd.job.process_sets import ProcessSet
from bagua_hvd.training.buckets import Bucket
from bagua_hvd.training.model import Model


class DiLoCo(LocalSteps):
    """Local steps, and an outer Nesterov SGD over the ranks.

    Args:
        communication_interval: H, inner steps for each outer one, 1 or more.
        outer_lr: eta. outer_momentum: mu, 0 <= mu < 1.
        warmup_steps: steps with averaged gradients before; the paper begins with a model that has been trained so for a
            quarter of all steps.
    """

    uses_weights = ("before_step", "after_step")

    def __init__(self, communication_interval: int = 500, outer_lr: float = 0.7, outer_momentum: float = 0.9,
                 warmup_steps: float = 0) -> None:
        super().__init__(communication_interval, warmup_steps)
        if not outer_lr > 0:
            raise ValueError(f"outer_lr={outer_lr!r}: expected a number above 0")
        if not 0 <= outer_momentum < 1:
            raise ValueError(f"outer_momentum={outer_momentum!r}: expected 0 <= outer_momentum < 1")
        self.outer_lr = outer_lr
        self.outer_momentum = outer_momentum

    def before_step(self, model: Model) -> None:
        if self.gradients_travel(model):
            return
        # The ranks may begin apart: theta is the mean of where they are, which is bit-equal everywhere.
        for bucket in model.weights:
            bucket.state.keep("theta", functools.partial(self._theta, bucket, model.group), shared=True)

    def _theta(self, bucket: Bucket, group: ProcessSet) -> np.ndarray:
        return bucket.read() if bucket.state.loaded("theta") else Mean(bucket, group).wait().copy()

    def after_step(self, model: Model) -> None:
        if not self.ends_interval(model):
            return
        means = [Mean(bucket, model.group) for bucket in model.weights]
        for bucket, x in zip(model.weights, means, strict=True):
            theta = bucket.state["theta"]
            m = bucket.state.zeros_like("momentum", theta, shared=True)
            delta = theta - x.wait()
            m[:] = self.outer_momentum * m + delta
            theta -= self.outer_lr * (delta + self.outer_momentum * m)
            bucket.write(theta)
