"""1-bit Adam: Adam whose momentum travels as one bit per element, with error feedback, once its variance has settled.

As QAdam (qadam.py), with

    m = C_LP_S(m_i; sign_rms, e_i, f_k)         D(Q(u)) = (||u||_2 / sqrt(N)) sign(u), in both passes with its error

One bit cannot say 0. Where v = 0, an element has never had a gradient (a row of an embedding that was never used): m
stays 0 there, or the division by sqrt(v) would blow it up.

Wire after the warm-up: N/4 bytes (n-1)/n per rank.
State: 4 (N + N/n) bytes of errors.
Source: Tang et al., arXiv:2102.02888.  Differs: bias corrections as in QAdam, so that steps do not jump where v is
frozen.
"""
import numpy as np

from bagua_hvd.algorithms.base import error_state
from bagua_hvd.algorithms.qadam import QAdam
from bagua_hvd.primitives import c_lp_s, sign_rms


class OneBitAdam(QAdam):
    """Adam with 1-bit momentum; optimizers and arguments as for QAdam."""

    codec = sign_rms

    def __init__(self, hierarchical=False, warmup_steps=None):
        super().__init__(hierarchical, warmup_steps)

    def exchange(self, bucket, m, v):
        m[v == 0] = 0
        group = bucket.model.group
        return c_lp_s(
            m, group, codec=self.codec, error=error_state(bucket, group), name=bucket.name,
            hierarchical=self.hierarchical,
        )

    def received(self, m, v):
        return np.where(v == 0, 0, m).astype(m.dtype)
