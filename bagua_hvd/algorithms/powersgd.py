"""PowerSGD: gradients of matrices travel as products of two thin ones.

Of each gradient of two dimensions or more, as a matrix G_i (rows x columns) on rank i, with error E_i and rank-r
factor Q:

    M_i = G_i + E_i
    P   = orthonormal columns of mean_i M_i Q           first allreduce, r rows numbers
    Q   = mean_i M_i^T P                                second allreduce, r columns numbers
    G   = P Q^T             E_i <- M_i - G

Vectors, and matrices that would not become smaller, travel whole with the first allreduce. Q is kept from step to step
and begins equal on all ranks. A matrix in which any rank has a NaN or an infinity becomes NaN on all of them; E_i and Q
stay as they were, so that training goes on when loss scaling skips the step.

Wire: 2 (n-1)/n (r (rows + columns) summed over matrices, plus vectors) elements.
State: N + r columns elements.
Source: Vogels et al., arXiv:1905.13727.
"""
from typing import Any

import numpy as np

from bagua_hvd.algorithms.base import Algorithm, not_negative, positive
from bagua_hvd.job.process_sets import ProcessSet
from bagua_hvd.primitives import c_fp_s
from bagua_hvd.training.buckets import Bucket


def orthonormal(p: np.ndarray) -> Any:
    """Columns made orthonormal by Gram-Schmidt, in place; a column that vanishes stays as it is."""
    for j in range(p.shape[1]):
        for k in range(j):
            p[:, j] -= (p[:, k] @ p[:, j]) * p[:, k]
        norm = np.sqrt(p[:, j] @ p[:, j])
        if norm > 0:
            p[:, j] /= norm
    return p


class _Exchange:
    """The two allreduces of one bucket. wait() does what lies between and after them."""

    def __init__(self, bucket, group, rank):
        self._bucket, self._group = bucket, group
        gradient = bucket.read()
        error = bucket.state.keep("error", lambda: np.zeros_like(gradient), fits=lambda e: e.size == gradient.size,
                                  scaled=True)
        self._flat, self._error = gradient, error
        self._matrices, self._factors = [], []
        self._plain = []
        for (index, member), part in zip(bucket.members.items(), bucket.slices(), strict=True):
            rows = member.shape[0] if len(member.shape) > 1 else 0
            columns = member.count // rows if rows else 0
            if rows * columns <= rank * (rows + columns):
                self._plain.append(part)
                continue
            gradient[part] += error[part]
            self._matrices.append((part, gradient[part].reshape(rows, columns)))
            first = np.random.default_rng(index)
            self._factors.append(bucket.state.keep(
                f"Q.{index}",
                lambda r=first, c=columns: orthonormal(r.standard_normal((c, rank)).astype(gradient.dtype)),
                shared=True,
            ))
        products = [(m @ q).ravel() for (_, m), q in zip(self._matrices, self._factors, strict=True)]
        self._first = np.concatenate([*products, *(gradient[part] for part in self._plain), gradient[:0]])
        self._operation = self._mean(self._first, "P")

    def _mean(self, values, what):
        return c_fp_s(
            values, self._group, name=f"{self._bucket.name}.{what}", prescale_factor=self._bucket.prescale_factor,
            postscale_factor=self._bucket.postscale_factor,
        )

    def wait(self):
        self._operation.wait()
        ps, begin = [], 0
        for (_, m), q in zip(self._matrices, self._factors, strict=True):
            end = begin + m.shape[0] * q.shape[1]
            ps.append(orthonormal(self._first[begin:end].reshape(m.shape[0], -1)))
            begin = end
        result = np.empty_like(self._flat)
        for part in self._plain:
            end = begin + part.stop - part.start
            result[part] = self._first[begin:end]
            begin = end
        second = np.concatenate([*((m.T @ p).ravel() for (_, m), p in zip(self._matrices, ps, strict=True)),
                                 self._flat[:0]])
        self._mean(second, "Q").wait()
        begin = 0
        for (part, m), p, q in zip(self._matrices, ps, self._factors, strict=True):
            factor = second[begin:begin + q.size].reshape(q.shape)
            begin += q.size
            approximation = p @ factor.T
            if np.isfinite(approximation).all():
                q[:] = factor
                self._error[part] = (m - approximation).ravel()
            else:
                approximation[:] = np.nan
            result[part] = approximation.ravel()
        self._bucket.write(result)


class PowerSGD(Algorithm):
    """Averages low-rank approximations of gradients, with error feedback.

    Args:
        rank: r, 1 or more.
        warmup_steps: steps of plain gradient averaging before.
    """

    counts_steps = True
    remembers_gradients = True

    def __init__(self, rank: int = 2, warmup_steps: float = 10) -> None:
        self.rank = positive("rank", rank)
        self.warmup_steps = not_negative("warmup_steps", warmup_steps)

    def communicate(self, bucket: Bucket, group: ProcessSet) -> Any:
        if bucket.step < self.warmup_steps:
            return c_fp_s(bucket, group)
        return _Exchange(bucket, group, self.rank)
