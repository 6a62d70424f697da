"""TernGrad: gradients as -s, 0 or s, drawn so that the mean is right.

Of each tensor g of the gradient, N elements, on each rank:

    v         = clip(g, -c sigma, c sigma)      sigma = sqrt(mean_j g_j^2); without clipping v = g
    D(Q(v))_j = s sgn(v_j) b_j                  s = max_j |v_j|, b_j = 1 with probability |v_j| / s, else 0
    g         = mean over the ranks of D(Q(v))

Its variance is s |v_j| - v_j^2: s decides. So each tensor has its own, for layers differ by orders of magnitude, and is
clipped, for a few elements are far from all others; c = 2.5 changes normally distributed ones hardly, and the noise is
about as large as they are.

Every rank sends its two bits for each element to all others, and adds up all of them itself.

Wire: (n-1) N/4 bytes per rank, and a header for each tensor.
Memory: N elements from the gradient to the step. State: none; the random numbers are a function of step, tensor, rank
and element.
Source: Wen et al., arXiv:1705.07878.  Differs: s is each rank's own instead of the maximum over the ranks, which costs
no round of communication; sigma is of the distance from 0 and not from the mean, or a tensor of one element would
vanish.
"""
import numpy as np

from bagua_hvd.algorithms.base import Algorithm
from bagua_hvd.primitives import c_lp_s, ternary


def clipped(g, c):
    """g, a flat array, with its elements moved in place to within c sigma of 0. Has it a NaN, all become NaN."""
    bound = g.dtype.type(c * np.sqrt(np.mean(np.square(g, dtype=np.float64))))
    return np.clip(g, -bound, bound, out=g)


class _Tensors:
    """The tensors of a bucket on their way, each by itself."""

    def __init__(self, bucket, group, clip, average):
        self._bucket = bucket
        self._gradient = bucket.read(workspace="gradient")
        self._operations = []
        for index, part in zip(bucket.members, bucket.slices(), strict=True):
            g = self._gradient[part]
            if not g.size:
                continue
            self._operations.append(c_lp_s(
                g if clip is None else clipped(g, clip), group, codec=ternary, average=average, exchange="allgather",
                seed=(bucket.step << 32) + index, name=f"{bucket.name}.{index}",
                prescale_factor=bucket.prescale_factor, postscale_factor=bucket.postscale_factor,
            ))

    def wait(self):
        for operation in self._operations:
            operation.wait()
        self._bucket.write(self._gradient)


class TernGrad(Algorithm):
    """Averages ternary gradients.

    Args:
        clip: c, root mean squares at which each tensor's gradient is clipped, 1 or more; None: not at all.
        average: False for the sum.
    """

    counts_steps = True         # the seed

    def __init__(self, clip=2.5, average=True):
        if clip is not None and not clip >= 1:
            raise ValueError(f"clip={clip!r}: expected a number of 1 or more, or None")
        self.clip = clip
        self.average = average

    def takes(self, dtype):
        return ternary.takes(dtype)

    def communicate(self, bucket, group):
        return _Tensors(bucket, group, self.clip, self.average)
