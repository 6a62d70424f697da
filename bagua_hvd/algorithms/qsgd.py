"""QSGD: unbiased stochastic quantization to s levels of the norm of each 512 elements.

    Q(v)_j = ||v||_2 sgn(v_j) xi_j        a = |v_j| s / ||v||_2, l = floor(a)
                                          xi_j = (l + 1) / s with probability a - l, else l / s

in both passes of C_LP_S, without error state: the mean over steps and ranks is right, its variance at most
min(512/s^2, sqrt(512)/s) ||v||^2 for each of the two.

Wire: two codes of about N (n-1)/n bytes.
State: none; the random numbers are a function of step, rank and element.
Source: Alistarh et al., arXiv:1610.02132.  Differs: one byte for each level instead of Elias codes.
"""
from typing import Any

from bagua_hvd.algorithms.base import Algorithm, Safety
from bagua_hvd.job.process_sets import ProcessSet
from bagua_hvd.primitives import c_lp_s, qsgd
from bagua_hvd.training.buckets import Bucket
from bagua_hvd.tuning.cost import Cost, Ranks, coded


class QSGD(Algorithm):
    """Averages stochastically quantized gradients.

    Args:
        levels: s, 1 to 127.
        hierarchical: full precision within hosts, codes between them.
        average: False for the sum.
    """

    safety = Safety.E1
    counts_steps = True         # the seed

    def __init__(self, levels: int = 127, hierarchical: bool = False, average: bool = True) -> None:
        self.codec = qsgd(levels)
        self.hierarchical = hierarchical
        self.average = average

    def takes(self, dtype: int) -> bool:
        return self.codec.takes(dtype)

    def communicate(self, bucket: Bucket, group: ProcessSet) -> Any:
        return c_lp_s(
            bucket, group, codec=self.codec, average=self.average, hierarchical=self.hierarchical,
            seed=bucket.seed(bucket.step),
        )

    def cost(self, elements: int, dtype: int, ranks: Ranks) -> Cost:
        return coded(self.codec, elements, dtype, ranks, self.hierarchical)
