"""Full steps: steps of a relaxed algorithm that average the gradients of all elements; and the base of local steps.

The steps t = 0, 1, ... in T_v are full, with K = full_steps:

    T_v     the first K steps, then K more at intervals of 2, of 4, of 8, ...
    g       = mean_i D(Q(g_i))              Q: 8-bit floats (float8), encoded again for the allgather
    g       = mean_i g_i                    on one host, where memory is faster than encoding

About K log2(t / K) of the first t steps are full: with K = 64 half of 300 steps, a sixth of 2,000. Adam's variance
comes from these steps alone (training/variance.py). It needs many of them, but few bits of each element: Q keeps the
first three bits of a number, even if its neighbours are much larger.

Wire: 2 N (n-1)/n bytes per rank in such a step. On GPUs Q is minmax_uint8, for which there are kernels.
Source: T_v is 0/1 Adam's, Lu et al., arXiv:2202.06009. The algorithms' own papers have no such steps (full_steps=0), or
have them in full precision (BAGUA_FULL_STEP_BITS=32), as 0/1 Adam does.
"""
import numpy as np

from bagua_hvd.algorithms.base import Algorithm, Safety, not_negative, positive
from bagua_hvd.codecs import Codec, float8, minmax_uint8
from bagua_hvd.core import variables
from bagua_hvd.core.operations import Posted
from bagua_hvd.job.process_sets import ProcessSet
from bagua_hvd.job.runtime import local_size, size
from bagua_hvd.primitives import c_fp_s, c_lp_s
from bagua_hvd.training.buckets import Bucket
from bagua_hvd.training.model import Model
from bagua_hvd.training.source import Pending


def codec_for(bucket: Bucket) -> Codec | None:
    """The codec of a full step for a bucket, the same on all ranks; None: full precision."""
    on_one_host = local_size() == size()
    if (variables.read("BAGUA_FULL_STEP_BITS") or ("32" if on_one_host else "8")) == "32":
        return None
    codec = float8() if bucket.views[0].placement is None else minmax_uint8
    return codec if codec.takes(bucket.dtype) else None


def mean_of_gradients(bucket: Bucket, group: ProcessSet, average: bool = True) -> Posted:
    """Starts the averaging of a bucket of gradients in a full step; in full precision within hosts."""
    codec = codec_for(bucket)
    if codec is None:
        return c_fp_s(bucket, group, average=average)
    return c_lp_s(bucket, group, codec=codec, average=average, hierarchical=variables.read("BAGUA_HIERARCHY"))


def count(t: int, K: int) -> int:
    """How many of the steps 0 ... t - 1 are in T_v."""
    counted, last, interval = 0, -1, 1
    while K and t - 1 > last:
        more = min(K, (t - 1 - last) // interval)
        counted, last, interval = counted + more, last + K * interval, 2 * interval
    return counted


def is_full(t: int, K: int) -> bool:
    """Whether t is in T_v."""
    return count(t + 1, K) > count(t, K)


class FullSteps(Algorithm):
    """Base class of algorithms that are relaxed except in full steps.

    Args:
        warmup_steps: initial full steps; at least full_steps.
        full_steps: K, full steps at each interval. 0: none, and Adam keeps its own variance. None: BAGUA_FULL_STEPS,
            whose default is 64.
    """

    def __init__(self, warmup_steps: float = 0, full_steps: int | None = None) -> None:
        default = variables.read("BAGUA_FULL_STEPS")
        self.full_steps = default if full_steps is None else not_negative("full_steps", full_steps)
        self.warmup_steps = max(not_negative("warmup_steps", warmup_steps), self.full_steps)
        self.counts_steps = self.warmup_steps > 0 or type(self).counts_steps
        self.shares_variance = self.full_steps > 0

    def full_step(self, model: Model | None) -> bool:
        if model is None:       # a standalone bucket has no step
            return False
        return model.step < self.warmup_steps or is_full(model.step, self.full_steps)


class LocalSteps(FullSteps):
    """Base class: averages gradients in the warm-up; then ranks step locally and communicate weights at intervals.

    Early in training, ranks drift apart fastest and gain most from the mean gradient. So local steps may begin late,
    when the learning rate first decays (post-local SGD, Lin et al., arXiv:1808.07217).

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

    def full_step(self, model: Model | None) -> bool:
        if self.asynchronous:       # after the warm-up ranks may be in different steps
            return model is not None and model.step < self.warmup_steps
        return super().full_step(model)

    def takes_more(self, model: Model) -> bool:
        return "rounds" not in model.scratch or model.scratch["rounds"].stopped     # in which all buckets are equal

    def communicates_gradients(self, model: Model) -> bool:
        return self.full_step(model)

    def communicate(self, bucket: Bucket, group: ProcessSet) -> Pending:
        return mean_of_gradients(bucket, group)

    def begins_interval(self, model: Model) -> bool:
        """Whether this local step begins an interval; the first one does."""
        local = model.step - self.warmup_steps
        return local >= 0 and local % self.communication_interval == 0

    def ends_interval(self, model: Model) -> bool:
        """Whether this local step ends an interval."""
        local = model.step + 1 - self.warmup_steps
        return local > 0 and local % self.communication_interval == 0


_IN_CACHE = 1 << 16         # elements


class Mean:
    """(1/n) sum_i x_i in flight; x_i: the values of a bucket at construction. One at a time for each bucket.

    n is the number of participating ranks: each appends a 1 to its values, and a rank in join() adds 0.

    Attributes:
        operation: the operation that wait() and difference() wait for.
    """

    def __init__(self, bucket: Bucket, group: ProcessSet) -> None:
        values = bucket.read(tail=1, workspace="mean of")
        values[-1] = 1
        self._sum = bucket.workspace("mean", values.size, values.dtype)
        self.operation: Posted = c_fp_s(values, group, average=False, out=self._sum, name=bucket.name)
        self._values = values[:-1]

    def wait(self) -> np.ndarray:
        """Blocks; returns the mean: flat, bit-equal on all ranks, valid until the bucket's next Mean is made."""
        self.operation.wait()
        mean, ranks = self._sum[:-1], self._sum[-1]
        mean /= ranks
        return mean

    def difference(self) -> np.ndarray:
        """As wait(), but returns the mean minus x_i."""
        self.operation.wait()
        difference, ranks = self._sum[:-1], self._sum[-1]
        for begin in range(0, difference.size, _IN_CACHE):
            part = slice(begin, begin + _IN_CACHE)
            difference[part] /= ranks
            difference[part] -= self._values[part]
        return difference
