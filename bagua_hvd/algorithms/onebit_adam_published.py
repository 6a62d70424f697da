"""1-bit Adam as it was published: the momentum itself travels as one bit per element, with error feedback.

As QAdam (qadam.py), but with 1 bit and errors e_i, and f_k of the chunk k = i:

    m = C_LP_S(m_i; sign_rms, e_i, f_k)         D(Q(m)) = (||m||_2 / sqrt(N)) sign(m), in both passes with its error

Wire after the warm-up: N/4 (n-1)/n bytes per rank.
State: 4 (N + N/n) bytes of errors.
Source: Tang et al., arXiv:2102.02888, algorithm 1; DeepSpeed's OnebitAdam until 0.19.  Differs: bias corrections,
frozen with v, as in QAdam; one scale for a bucket instead of each tensor or all; m is 0 where v is; steps are
bounded as there (bounded=False: they are not).

Limits: all elements of a bucket receive a momentum of the same size, so those of small v make steps that are too large.
Where v differs by orders of magnitude it diverges without the bound, unless the warm-up is very long: onebit_adam.py
repairs that.
"""
import numpy as np

from bagua_hvd.algorithms.base import error_state
from bagua_hvd.algorithms.qadam import QAdam
from bagua_hvd.primitives import c_lp_s, sign_rms
from bagua_hvd.training.buckets import Bucket
from bagua_hvd.training.source import Pending


class OneBitAdamPublished(QAdam):
    """Adam with a 1-bit momentum, in the momentum's unit; optimizers and arguments as for QAdam."""

    codec = sign_rms

    def __init__(self, hierarchical: bool = False, warmup_steps: int | None = None, bounded: bool = True) -> None:
        super().__init__(hierarchical, warmup_steps, bounded)

    def exchange(self, bucket: Bucket, m: np.ndarray) -> Pending:
        group = bucket.model.group
        return c_lp_s(
            m, group, codec=self.codec, name=bucket.name, hierarchical=self.hierarchical,
            error=error_state(bucket, group, self.hierarchical, scaled=False),
        )
