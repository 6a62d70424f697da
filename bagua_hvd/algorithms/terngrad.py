"""TernGrad: gradients as -s, 0 or s, drawn so that the mean is right.

    D(Q(v))_j = s sgn(v_j) b_j        s = max_j |v_j|, b_j = 1 with probability |v_j| / s, else 0

Every rank sends its two bits for each element to all others, and adds up all of them itself.

Wire: (n-1) N/4 bytes per rank.
State: none; the random numbers are a function of step, rank and element.
Source: Wen et al., arXiv:1705.07878.  Differs: s is each rank's and bucket's own instead of the maximum over the
ranks, which costs no round of communication; clipping is left to the user.
"""
from bagua_hvd.algorithms.base import Algorithm
from bagua_hvd.primitives import c_lp_s, ternary


class TernGrad(Algorithm):
    """Averages ternary gradients.

    Args:
        average: False for the sum.
    """

    counts_steps = True         # the seed

    def __init__(self, average=True):
        self.average = average

    def takes(self, dtype):
        return ternary.takes(dtype)

    def communicate(self, bucket, group):
        return c_lp_s(
            bucket, group, codec=ternary, average=self.average, exchange="allgather", seed=bucket.step
        )
