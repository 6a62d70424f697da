"""Steps in full precision among relaxed ones, when nobody says how long a training is.

Of the steps t = 0, 1, ... those of T_v average gradients as gradient_allreduce does:

    T_v     the first kappa steps, then kappa more at intervals of 2, of 4, of 8, ...

About kappa log2(t / kappa) of the first t steps: a third of 300 steps with kappa = 32, a tenth of 2,000, and ever less.
They teach Adam its variance, which it then has of nothing else (training/variance.py).

Source: T_v is that of 0/1 Adam, Lu et al., arXiv:2202.06009. The algorithms' own papers have no such steps: kappa=0.
"""
from bagua_hvd.algorithms.base import Algorithm, not_negative
from bagua_hvd.core import variables
from bagua_hvd.training.model import Model


def count(t: int, kappa: int) -> int:
    """How many of the steps 0 ... t - 1 are in T_v."""
    counted, last, interval = 0, -1, 1
    while kappa and t - 1 > last:
        more = min(kappa, (t - 1 - last) // interval)
        counted, last, interval = counted + more, last + kappa * interval, 2 * interval
    return counted


def is_exact(t: int, kappa: int) -> bool:
    """Whether t is in T_v."""
    return count(t + 1, kappa) > count(t, kappa)


class ExactSteps(Algorithm):
    """Relaxed but for some steps.

    Args:
        warmup_steps: steps in full precision in the beginning.
        kappa: of T_v, which are in full precision, too; 0: none are, and Adam's variance is left alone. None: what
            BAGUA_EXACT_STEPS says, 32.
    """

    def __init__(self, warmup_steps: float = 0, kappa: int | None = None) -> None:
        self.kappa = variables.read("BAGUA_EXACT_STEPS") if kappa is None else not_negative("kappa", kappa)
        self.warmup_steps = max(not_negative("warmup_steps", warmup_steps), self.kappa)
        self.counts_steps = self.warmup_steps > 0 or type(self).counts_steps
        self.shares_variance = self.kappa > 0

    def exact(self, model: Model | None) -> bool:
        if model is None:       # a bucket by itself knows of no steps
            return False
        return model.step < self.warmup_steps or is_exact(model.step, self.kappa)
