"""Steps of which nothing is withheld among relaxed ones, when nobody says how long a training is.

Of the steps t = 0, 1, ... those of T_v average gradients, all elements of all ranks:

    T_v     the first kappa steps, then kappa more at intervals of 2, of 4, of 8, ...
    g       = mean_i D(Q(g_i))              Q: 8-bit floats (float8), encoded again on the way back
    g       = mean_i g_i                    in a job of one host, for which memory is quicker than encoding

About kappa log2(t / kappa) of the first t steps: half of 300 steps with kappa = 64, a sixth of 2,000, and ever less.
They teach Adam its variance, which it then has of nothing else (training/variance.py). For that it takes many of them,
and of each element a few bits: Q keeps the three first bits of a number, however small it is beside its neighbours.

Wire: 2 N (n-1)/n bytes per rank in such a step. On GPUs Q is minmax_uint8, for which there are kernels.
Source: T_v is that of 0/1 Adam, Lu et al., arXiv:2202.06009. The algorithms' own papers have no such steps: kappa=0;
where they have, and in 0/1 Adam, full precision: BAGUA_EXACT_BITS=32.
"""
from bagua_hvd.algorithms.base import Algorithm, not_negative
from bagua_hvd.codecs import Codec, float8, minmax_uint8
from bagua_hvd.core import variables
from bagua_hvd.core.context import Posted
from bagua_hvd.job.process_sets import ProcessSet
from bagua_hvd.job.runtime import local_size, size
from bagua_hvd.primitives import c_fp_s, c_lp_s
from bagua_hvd.training.buckets import Bucket
from bagua_hvd.training.model import Model


def codec_for(bucket: Bucket) -> Codec | None:
    """What an exact step encodes a bucket with, the same on all ranks; None: with nothing."""
    on_one_host = local_size() == size()
    if (variables.read("BAGUA_EXACT_BITS") or ("32" if on_one_host else "8")) == "32":
        return None
    codec = float8() if bucket.views[0].placement is None else minmax_uint8
    return codec if codec.takes(bucket.dtype) else None


def mean_of_gradients(bucket: Bucket, group: ProcessSet, average: bool = True) -> Posted:
    """Begins what an exact step does with a bucket of gradients; within hosts in full precision."""
    codec = codec_for(bucket)
    if codec is None:
        return c_fp_s(bucket, group, average=average)
    return c_lp_s(bucket, group, codec=codec, average=average, hierarchical=variables.read("BAGUA_HIERARCHY"))


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
        warmup_steps: exact steps in the beginning.
        kappa: of T_v, which are exact, too; 0: none are, and Adam's variance is left alone. None: what
            BAGUA_EXACT_STEPS says, 64.
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
