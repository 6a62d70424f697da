"""PowerSGD: sends each gradient matrix as a product of two thin matrices.

Each gradient of two dimensions or more is a matrix G_i (rows x columns) on rank i, with error E_i and rank-r factor Q:

    M_i = G_i + E_i
    P   = orthonormal columns of mean_i M_i Q           first allreduce, r rows numbers
    Q   = mean_i M_i^T P                                second allreduce, r columns numbers
    G   = P Q^T             E_i <- M_i - G

Vectors, and matrices that would not become smaller, are sent whole in the first allreduce. Q is kept between steps,
divided by a power of two, and starts equal on all ranks. A matrix with NaN or infinity on any rank becomes NaN on all
ranks; E_i and Q do not change then, so that training continues when loss scaling skips the step.

Wire: 2 (n-1)/n (r (rows + columns) summed over matrices, plus vectors) elements.
State: N + r columns elements.
Source: Vogels et al., arXiv:1905.13727.
"""
import functools

import numpy as np

from bagua_hvd.algorithms.base import Safety, positive
from bagua_hvd.algorithms.exchange import Steps, exchange
from bagua_hvd.algorithms.full_steps import FullSteps, mean_of_gradients
from bagua_hvd.core.operations import Posted
from bagua_hvd.job.process_sets import ProcessSet
from bagua_hvd.primitives import c_fp_s
from bagua_hvd.training.buckets import Bucket
from bagua_hvd.training.source import Pending


def orthonormal(matrix: np.ndarray) -> np.ndarray:
    """Orthonormal columns that span those of a matrix, with others if these are dependent. Any NaN makes all NaN."""
    with np.errstate(invalid="ignore", over="ignore"):
        q: np.ndarray = np.linalg.qr(matrix)[0]
    return q


def mean_of(arrays: list[np.ndarray], bucket: Bucket, group: ProcessSet,
            what: str) -> tuple[list[np.ndarray], Posted]:
    """(the means of arrays over the ranks, the operation that computes them), with the bucket's factors."""
    flat: np.ndarray = np.concatenate([array.ravel() for array in arrays])
    ends: np.ndarray = np.cumsum([array.size for array in arrays])
    means = [part.reshape(array.shape) for part, array in zip(np.split(flat, ends[:-1]), arrays, strict=True)]
    return means, c_fp_s(flat, group, name=f"{bucket.name}.{what}", prescale_factor=bucket.prescale_factor,
                         postscale_factor=bucket.postscale_factor)


class PowerSGD(FullSteps):
    """Averages low-rank approximations of gradients, with error feedback.

    Args:
        rank: r, 1 or more.
        warmup_steps, full_steps: see FullSteps.
    """

    safety = Safety.E2
    counts_steps = True
    remembers_gradients = True

    def __init__(self, rank: int = 4, warmup_steps: float = 0, full_steps: int | None = None) -> None:
        super().__init__(warmup_steps, full_steps)
        self.rank = positive("rank", rank)

    def communicate(self, bucket: Bucket, group: ProcessSet) -> Pending:
        if self.full_step(bucket.model):
            return mean_of_gradients(bucket, group)
        return self._low_rank(bucket, group)

    @exchange
    def _low_rank(self, bucket: Bucket, group: ProcessSet) -> Steps:
        g = bucket.read()
        error = bucket.state.zeros_like("error", g, scaled=True)
        of_matrices, of_vectors, Ms, Qs = [], [], [], []
        for place, ((index, member), part) in enumerate(zip(bucket.members.items(), bucket.slices(), strict=True)):
            rows = member.shape[0] if len(member.shape) > 1 else 0
            columns = member.count // rows if rows else 0
            if rows * columns <= self.rank * (rows + columns):
                of_vectors.append(part)
                continue
            of_matrices.append(part)
            g[part] += error[part]
            Ms.append(g[part].reshape(rows, columns))
            first = functools.partial(self._first, index, columns, g.dtype)
            Qs.append(bucket.state.keep(f"Q.{place}", first, shared=True))

        products = [M @ Q for M, Q in zip(Ms, Qs, strict=True)]
        means, operation = mean_of([*products, *(g[part] for part in of_vectors)], bucket, group, "P")
        yield operation
        for part, mean in zip(of_vectors, means[len(Ms):], strict=True):
            g[part] = mean
        if Ms:
            Ps = [orthonormal(mean) for mean in means[:len(Ms)]]
            means, operation = mean_of([M.T @ P for M, P in zip(Ms, Ps, strict=True)], bucket, group, "Q")
            yield operation
            for part, M, P, Q, mean in zip(of_matrices, Ms, Ps, Qs, means, strict=True):
                G = P @ mean.T
                if np.isfinite(G).all():
                    # If Q were as large as M, M Q would overflow. A power of two changes no bit of P.
                    Q[:] = np.ldexp(mean, -np.frexp(abs(mean).max())[1])
                    error[part] = (M - G).ravel()
                else:
                    G[:] = np.nan
                g[part] = G.ravel()
        bucket.write(g)

    def _first(self, index: int, columns: int, dtype: np.dtype) -> np.ndarray:
        """The initial Q of matrix `index`, equal on all ranks."""
        return orthonormal(np.random.default_rng(index).standard_normal((columns, self.rank)).astype(dtype))
