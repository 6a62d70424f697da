"""Gradient allreduce: as in Horovod, in buckets.

Rank i of n holds the bucket g_i (N elements).

    g = (1/n) sum_i g_i        (average=False: the sum)

Wire: 2 N (n-1)/n elements per rank in a ring. No state.
Source: Sergeev and Del Balso, Horovod, arXiv:1802.05799; as C_FP_S in Gan et al., BAGUA, arXiv:2107.01499.
"""
from typing import Any

from bagua_hvd.algorithms.base import Algorithm, Safety
from bagua_hvd.job.process_sets import ProcessSet
from bagua_hvd.primitives import c_fp_s
from bagua_hvd.training.buckets import Bucket
from bagua_hvd.tuning.cost import Cost, Ranks, allreduced


class GradientAllReduce(Algorithm):
    """Averages gradients in full precision.

    Args:
        hierarchical: request reduction within hosts first. On one host it has no effect; between hosts the core
            chooses (native/core/engine/execute.c), and neither choice changes the result beyond rounding.
        average: False for the sum.
    """

    safety = Safety.E0

    def __init__(self, hierarchical: bool = True, average: bool = True) -> None:
        self.hierarchical = hierarchical
        self.average = average

    def communicate(self, bucket: Bucket, group: ProcessSet) -> Any:
        return c_fp_s(bucket, group, average=self.average)

    def cost(self, elements: int, dtype: int, ranks: Ranks) -> Cost:
        return allreduced(elements, dtype)
