"""CHOCO-SGD: gossip on a ring with any compressor that contracts.

Rank i keeps replicas of itself and of its neighbours j, and after the optimizer's step, every communication_interval
steps:

    q_i  = Q(x_i - x^_i)                        sent to both neighbours
    x^_j += D(q_j)                              j = i and its neighbours, everywhere from the same bytes
    x_i  += gamma sum_j W_ij (x^_j - x^_i)      W_ij = 1/3 on the ring

hierarchical: i and j are hosts, x_i is the mean of a host's ranks, which all get the result.

It converges for every contraction Q, down to one bit, when gamma is small enough; LowPrecisionDecentralized needs 8
bits.

Wire per communication: two codes of N elements; with sign N/4 bytes.
Memory: 12 N bytes.
Source: Koloskova et al., arXiv:1902.00340.  Differs: replicas begin as the weights and not as zeros.
"""
import numpy as np

from bagua_hvd.algorithms.base import checked, valid_codec
from bagua_hvd.algorithms.full_steps import LocalSteps
from bagua_hvd.codecs import Codec, float32
from bagua_hvd.job.process_sets import ProcessSet
from bagua_hvd.primitives import Replicas, d_lp_s, sign
from bagua_hvd.training.buckets import Bucket
from bagua_hvd.training.model import Model


def replicas_of(bucket: Bucket, group: ProcessSet, hierarchical: bool) -> Replicas:
    """The bucket's Replicas; initially the weights of this rank and its neighbours, sent in full precision.

    Collective when they must be made, as is then the case on all ranks (Reducer._agree).
    """
    def make() -> Replicas:
        replicas = Replicas(*np.zeros((3, bucket.count), np.float32))
        if not bucket.state.loaded("replicas"):
            x: np.ndarray = bucket.read().astype(np.float32)
            d_lp_s(x, group, float32, replicas, hierarchical=hierarchical, name=f"{bucket.name}.replicas").wait()
        return replicas

    return bucket.state.keep("replicas", make, fits=lambda kept: kept.fits(bucket.count))


class Choco(LocalSteps):
    """Gossips compressed differences of weights with two neighbours.

    Args:
        codec: for the differences, from bagua_hvd.primitives; must support the weights' dtype.
        gamma: consensus step size, 0 < gamma <= 1; coarser codecs need a smaller one.
        hierarchical: hosts are the neighbours, each with the mean of its ranks; a host with fewer ranks than this one
            has less weight (primitives.d_lp_s), so that the mean over all ranks is preserved.
        communication_interval, warmup_steps, full_steps: see LocalSteps.
    """

    uses_weights = ("after_step",)
    before: tuple[float, ...]
    after: tuple[float, ...]

    def __init__(self, codec: Codec = sign, gamma: float = 0.7, hierarchical: bool = False,
                 communication_interval: int = 1, warmup_steps: float = 0, full_steps: int | None = None) -> None:
        super().__init__(communication_interval, warmup_steps, full_steps)
        self.codec = valid_codec(codec)
        self.gamma = checked("gamma", gamma, lambda size: 0 < size <= 1, "0 < gamma <= 1")
        self.hierarchical = hierarchical
        self.before, self.after = (-1, 0, 0), (1, -2 * gamma / 3, gamma / 3, gamma / 3)     # of d_lp_s

    def after_step(self, model: Model) -> None:
        if not self.begins_interval(model):
            return
        group, hierarchical = model.group, self.hierarchical
        rounds = [d_lp_s(x, group, self.codec, replicas_of(x, group, hierarchical), hierarchical=hierarchical,
                         seed=x.seed(model.step), before=self.before, after=self.after) for x in model.weights]
        for x, operation in zip(model.weights, rounds, strict=True):
            operation.wait()
            x.written()
