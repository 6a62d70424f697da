"""TernGrad: gradients as -s, 0 or s, drawn so that the mean is right.

Rank i of n holds the gradient g_i of a tensor, N elements:

    s       = c sqrt(mean_i mean_j g_ij^2)              one allreduce of a number for each tensor
    v_i     = clip(g_i, -s, s)
    Q(v_i)_j = s sgn(v_ij) b_ij                         b_ij = 1 with probability |v_ij| / s, else 0
    g       = mean_i Q(v_i)

The variance of Q(v_i)_j is s |v_ij| - v_ij^2: s decides. So each tensor has its own, for layers differ by orders of
magnitude, and is clipped, for a few elements are far from all others; c = 2.5 changes normally distributed ones hardly,
and the noise is about as large as they are; a smaller c means less noise, and a bias.

Every rank sends its two bits for each element to all others, and adds up all of them itself.

Wire: (n-1) N/4 bytes per rank.
Memory: N elements from the gradient to the step. State: none; the random numbers are a function of step, rank and
element.
Source: Wen et al., arXiv:1705.07878.  Differs: s is where the gradient is clipped and not the largest that is left, and
is measured from 0 and over all ranks: so a tensor of one element does not vanish, and one sum tells all ranks s.
"""
import numpy as np

from bagua_hvd.algorithms.base import Safety
from bagua_hvd.algorithms.exchange import Steps, exchange
from bagua_hvd.algorithms.full_steps import FullSteps, mean_of_gradients
from bagua_hvd.job.process_sets import ProcessSet
from bagua_hvd.primitives import c_fp_s, c_lp_s, ternary
from bagua_hvd.training.buckets import Bucket
from bagua_hvd.training.source import Pending


class TernGrad(FullSteps):
    """Averages ternary gradients.

    Args:
        clip: c, root mean squares at which each tensor's gradient is clipped, 1 or more.
        average: False for the sum.
        hierarchical: full precision within hosts, codes between them.
        full_steps: see FullSteps.
    """

    safety = Safety.E1
    counts_steps = True         # the seed

    def __init__(self, clip: float = 2.5, average: bool = True, hierarchical: bool = True,
                 full_steps: int | None = None) -> None:
        super().__init__(0, full_steps)
        if not 1 <= clip < float("inf"):
            raise ValueError(f"clip={clip!r}: expected a number of 1 or more")
        self.clip = clip
        self.average = average
        self.hierarchical = hierarchical

    def takes(self, dtype: int) -> bool:
        return ternary.takes(dtype)

    def communicate(self, bucket: Bucket, group: ProcessSet) -> Pending:
        if self.full_step(bucket.model):
            return mean_of_gradients(bucket, group, self.average)
        return self._ternary(bucket, group)

    @exchange
    def _ternary(self, bucket: Bucket, group: ProcessSet) -> Steps:
        seed = bucket.seed(bucket.step)
        g = bucket.read(workspace="gradient")
        parts = [part for part in bucket.slices() if part.start < part.stop]
        # float64: so that the order in which ranks are added up does not show in s.
        squares = self.clip * self.clip * np.array([np.mean(np.square(g[part], dtype=np.float64)) for part in parts])
        yield c_fp_s(squares, group, name=f"{bucket.name}.scales")

        scales = np.sqrt(squares).astype(g.dtype)
        for s, part in zip(scales, parts, strict=True):
            # A NaN or an infinity is in s, on all ranks: it needs no code, which would spread it over other tensors.
            np.clip(g[part] / s if np.isfinite(s) and s > 0 else 0, -1, 1, out=g[part])
        yield c_lp_s(
            g, group, codec=ternary, average=self.average, exchange="allgather", seed=seed,
            name=f"{bucket.name}.codes", prescale_factor=bucket.prescale_factor,
            postscale_factor=bucket.postscale_factor, hierarchical=self.hierarchical,
        )
        for s, part in zip(scales, parts, strict=True):
            g[part] *= s
        bucket.write(g)
