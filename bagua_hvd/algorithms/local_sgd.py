"""Local SGD: every rank steps by itself, and all ranks average their weights every H steps.

    x_i <- x_i - step(g_i(x_i))
    x_i <- (1/n) sum_j x_j                      after every H-th step

Post-local SGD: in the first warmup_steps steps, gradients are averaged as in gradient_allreduce. Local steps begin
then, usually when the learning rate first decays.

Wire: 2 N (n-1)/n elements every H steps.
Memory: 2 N elements during the averaging.
Source: Stich, arXiv:1805.09767; Lin et al. (post-local SGD), arXiv:1808.07217.
"""
from bagua_hvd.algorithms.full_steps import LocalSteps, Mean
from bagua_hvd.training.model import Model


class LocalSGD(LocalSteps):
    """Averages weights at intervals.

    Args:
        communication_interval: H, optimizer steps from one averaging to the next, 1 or more.
        warmup_steps, full_steps: see LocalSteps.
    """

    uses_weights = ("after_step",)

    def __init__(self, communication_interval: int = 2, warmup_steps: float = 0, full_steps: int | None = None) -> None:
        super().__init__(communication_interval, warmup_steps, full_steps)

    def after_step(self, model: Model) -> None:
        if self.ends_interval(model):
            means = [Mean(x, model.group) for x in model.weights]
            for x, mean in zip(model.weights, means, strict=True):
                x.write(mean.wait())
