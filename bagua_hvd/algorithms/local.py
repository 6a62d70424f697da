"""What algorithms share that leave gradients where they are and communicate weights: an interval, and a warm-up.

For the first warmup_steps steps gradients are averaged as in full steps. From then on ranks step by themselves,
and every communication_interval-th step communicates; gradients are averaged now and then still (full_steps.py). Early
in a training ranks drift apart fastest and gain most from the mean gradient: so local steps may begin late, where the
learning rate first decays (post-local SGD, Lin et al., arXiv:1808.07217).
"""
from typing import Any

from bagua_hvd.algorithms.base import Safety, positive
from bagua_hvd.algorithms.full_steps import FullSteps, mean_of_gradients
from bagua_hvd.job.process_sets import ProcessSet
from bagua_hvd.training.buckets import Bucket
from bagua_hvd.training.model import Model


class LocalSteps(FullSteps):
    """Averaged gradients in the warm-up, then steps of each rank's own.

    Args:
        communication_interval: optimizer steps from one communication to the next, 1 or more.
        warmup_steps: steps with averaged gradients before the local ones begin; at least full_steps.
        full_steps: see FullSteps.
    """

    safety = Safety.E3
    models_differ = True
    counts_steps = True

    def __init__(self, communication_interval: int = 1, warmup_steps: float = 0, full_steps: int | None = None) -> None:
        super().__init__(warmup_steps, full_steps)
        self.communication_interval = positive("communication_interval", communication_interval)

    def gradients_travel(self, model: Model) -> bool:
        return self.full_step(model)

    def communicate(self, bucket: Bucket, group: ProcessSet) -> Any:
        return mean_of_gradients(bucket, group)

    def begins_interval(self, model: Model) -> Any:
        """Whether this is the first local step, or one whole intervals after it."""
        local = model.step - self.warmup_steps
        return local >= 0 and local % self.communication_interval == 0

    def ends_interval(self, model: Model) -> Any:
        """Whether with this one as many local steps have been made as are whole intervals."""
        local = model.step + 1 - self.warmup_steps
        return local > 0 and local % self.communication_interval == 0
