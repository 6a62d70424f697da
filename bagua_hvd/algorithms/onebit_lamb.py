"""1-bit LAMB: LAMB whose momentum travels as one bit per element, once its variance has settled.

Warm-up, the first warmup_steps steps T: LAMB (lamb.py), whose scale c of each tensor is remembered:

    c_avg = beta3 c_avg + (1 - beta3) c

From then on v is frozen at v_T, and with the gradient g_i of rank i

    m_i = beta1 m + (1 - beta1) g_i
    m'  = s C_LP_S(m_i / s; sign_rms, e_i, f_k)             s = ||m_T|| / sqrt(N) of each tensor
    g   = (m' - beta1 m) / (1 - beta1)                      the gradient, reconstructed
    v   = beta2 v + (1 - beta2) g^2                         goes on from v_T; only for r:
    r   = max |p(v_T) / p(v)|, p(v) = sqrt(v) + eps         within (1 +- r_threshold) r of before, and r_min ... r_max
    x   = x - gamma r c_avg (m' / p(v_T) + lambda x)        m = m'

with the bias corrections of Adam, p(v_T)'s being frozen. Where v_T = 0, m stays 0 (see qadam.py).

Wire after the warm-up: N/4 (n-1)/n bytes per rank.
State: 4 N bytes of v, 4 (N + N/n) of errors.
Source: after Li et al., arXiv:2104.06069, and the documentation of DeepSpeed's OneBitLamb (until 0.19), not compared
with either number by number.  Differs: bias corrections; c_avg begins with the first c; r is of the denominators of the
step, square roots and eps included.
"""
import numpy as np

from bagua_hvd.algorithms.lamb import check_bounds, direction, lamb_step, preconditioner, ratio
from bagua_hvd.algorithms.onebit_adam_published import OneBitAdamPublished
from bagua_hvd.training.adam import FlatAdam
from bagua_hvd.training.buckets import Bucket
from bagua_hvd.training.model import Model
from bagua_hvd.training.source import Pending


class OneBitLamb(OneBitAdamPublished):
    """LAMB with 1-bit momenta; optimizers as for Lamb.

    Args:
        hierarchical: full precision within hosts, codes between them.
        warmup_steps: T, steps of LAMB, 1 or more; None: that of the optimizer, if it has such an attribute, else 100.
        c_beta: beta3, 0 <= beta3 < 1. c_min, c_max: bounds of c in the warm-up.
        r_threshold: how far r may move in a step, of what it was. r_min, r_max: bounds of r.
    """

    def __init__(self, hierarchical: bool = False, warmup_steps: int | None = None, c_beta: float = 0.9,
                 c_min: float = 0.01, c_max: float = 10.0, r_threshold: float = 0.1, r_min: float = 0.5,
                 r_max: float = 4.0) -> None:
        super().__init__(hierarchical, warmup_steps, bounded=False)      # by trust ratio and r instead
        check_bounds(c_min, c_max)
        if not 0 <= c_beta < 1:
            raise ValueError(f"c_beta={c_beta!r}: expected 0 <= c_beta < 1")
        if not (0 < r_min <= 1 <= r_max and 0 < r_threshold < 1):
            raise ValueError(f"r_min={r_min!r}, r_max={r_max!r}, r_threshold={r_threshold!r}: expected 0 < r_min <= 1 "
                             "<= r_max and 0 < r_threshold < 1")
        self.c_beta, self.c_min, self.c_max = c_beta, c_min, c_max
        self.r_threshold, self.r_min, self.r_max = r_threshold, r_min, r_max

    def step(self, model: Model) -> bool:
        if self.frozen(model):
            return super().step(model)
        for bucket in model.gradients:
            self._learn(bucket, lamb_step(bucket, self.c_min, self.c_max))
        return True

    def _learn(self, bucket: Bucket, c: np.ndarray) -> None:
        average = bucket.state.keep("c", c.copy, shared=True)
        average[:] = self.c_beta * average + (1 - self.c_beta) * c

    def exchange(self, bucket: Bucket, m: np.ndarray) -> Pending:
        for s, part in zip(self._scales(bucket), bucket.slices(), strict=True):
            m[part] /= s
        return super().exchange(bucket, m)

    def _scales(self, bucket: Bucket) -> np.ndarray:
        """s of each tensor; asked for first when the warm-up has just ended."""
        def make() -> np.ndarray:
            m = FlatAdam(bucket).m
            sizes = [float(np.linalg.norm(m[part])) / np.sqrt(max(1, m[part].size)) for part in bucket.slices()]
            scales: np.ndarray = np.array([size if 0 < size < np.inf else 1 for size in sizes], m.dtype)
            return scales

        kept: np.ndarray = bucket.state.keep("s", make, shared=True)
        return kept

    def compressed_step(self, bucket: Bucket, m: np.ndarray) -> None:
        adam, state = FlatAdam(bucket), bucket.state
        before, adam.m, x, p = adam.m, m, adam.weights(), adam.denominator(self._frozen_for(bucket.model))
        v = state.keep("v", adam.v.copy, shared=True)
        r = state.keep("r", lambda: np.ones(len(adam.members)), shared=True)
        for (_, part), s in zip(adam.members, self._scales(bucket), strict=True):
            adam.m[part] *= s
        adam.m[adam.v == 0] = 0

        def first() -> np.ndarray:          # lost, when ranks that know nothing have come
            us = [direction(member, adam.m[part], p[part], x[part]) for member, part in adam.members]
            ratios: np.ndarray = np.array([ratio(x[part], u, self.c_min, self.c_max)
                                           for u, (_, part) in zip(us, adam.members, strict=True)])
            return ratios

        c = state.keep("c", first, shared=True)
        for place, (member, part) in enumerate(adam.members):
            g = (adam.m[part] - member.beta1 * before[part]) / (1 - member.beta1)
            v[part] = member.beta2 * v[part] + (1 - member.beta2) * g * g
            fresh = preconditioner(member, v[part], member.step + 1)
            lowest, highest = (1 - self.r_threshold) * r[place], (1 + self.r_threshold) * r[place]
            r[place] = np.clip(np.max(p[part] / fresh, initial=0), lowest, highest)
            r[place] = np.clip(r[place], self.r_min, self.r_max)
            x[part] -= member.lr * r[place] * c[place] * direction(member, adam.m[part], p[part], x[part])
        adam.save(x)
