"""Dion: low-rank orthonormal updates of matrices, of which only thin factors travel; Adam for the rest.

Of each weight of two dimensions or more, as a matrix x (rows x columns), with the gradient G_i of rank i, that rank's
momentum M_i, which begins with zeros, and a factor Q of r columns:

    B_i = M_i + G_i
    P   = orthonormal columns of mean_i B_i Q           one step of power iteration; first allreduce, r rows numbers
    R   = mean_i B_i^T P                                second allreduce, r columns numbers
    M_i = B_i - (1 - mu) P R^T                          what P R^T does not have is sent later: error feedback
    Q   = R with columns of length 1
    x   = x - gamma s P Q^T - gamma lambda x            s = scale sqrt(max(rows, columns))

Vectors, and matrices that would not become smaller, travel whole with the first allreduce; these are updated by Adam
with their mean. gamma, lambda and Adam's numbers are those of the user's Adam or AdamW (lambda is 0 in Adam, whose
weight decay is added to the gradient). Momenta never travel: the ranks' differ, the weights do not.

Wire: 2 (n-1)/n (r (rows + columns) summed over matrices, plus the rest) elements. Nothing of it in the backward pass:
loss scaling and clipping come before.
Memory: N + r columns elements beyond Adam's, whose two moments of the matrices lie idle.
Source: Ahn et al., arXiv:2504.05295, algorithms 1 and 3.  Differs: s makes updates as large as Adam's, so that both
kinds of weights have one gamma (Liu et al., arXiv:2502.16982), in place of sqrt(rows / columns), which would have to
know which of them a framework's layer feeds; orthonormal by QR on every rank, not a sharded Cholesky.
"""
import functools

import numpy as np

from bagua_hvd.algorithms.base import Algorithm, Safety
from bagua_hvd.algorithms.exchange import Steps, exchange
from bagua_hvd.algorithms.lamb import direction, preconditioner
from bagua_hvd.algorithms.powersgd import mean_of, orthonormal
from bagua_hvd.job.process_sets import ProcessSet
from bagua_hvd.primitives import c_fp_s
from bagua_hvd.training.adam import FlatAdam
from bagua_hvd.training.buckets import Bucket
from bagua_hvd.training.model import Model
from bagua_hvd.training.source import Pending


class Dion(Algorithm):
    """Low-rank orthonormal updates; optimizers as for Lamb. Embeddings are better given to another optimizer.

    Args:
        rank_fraction: r is this part of the smaller side of each matrix, rounded up, 0 < rank_fraction <= 1.
        momentum: mu, 0 <= mu < 1.
        scale: of updates of matrices, above 0.
    """

    safety = Safety.E2
    counts_steps = True
    dense_only = True
    uses_weights = ("step",)
    uses_adam = True
    replaces_step = True

    def __init__(self, rank_fraction: float = 0.25, momentum: float = 0.95, scale: float = 0.2) -> None:
        if not 0 < rank_fraction <= 1:
            raise ValueError(f"rank_fraction={rank_fraction!r}: expected a number above 0 and at most 1")
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum={momentum!r}: expected 0 <= momentum < 1")
        if not scale > 0:
            raise ValueError(f"scale={scale!r}: expected a number above 0")
        self.rank_fraction = rank_fraction
        self.momentum = momentum
        self.scale = scale

    def prepare(self, model: Model) -> None:
        model.adam()

    def gradients_travel(self, model: Model) -> bool:
        return False

    def communicate(self, bucket: Bucket, group: ProcessSet) -> Pending:
        return c_fp_s(bucket, group)

    def step(self, model: Model) -> bool:
        for begun in [self._step(bucket, model.group) for bucket in model.gradients]:
            begun.wait()
        return True

    @exchange
    def _step(self, bucket: Bucket, group: ProcessSet) -> Steps:
        adam, g = FlatAdam(bucket, begin=True), bucket.flat(bucket.gradients)
        x, mu = adam.weights(), self.momentum
        momentum = bucket.state.zeros_like("momentum", g)
        matrices, rest, Bs, Qs = [], [], [], []
        tensors = enumerate(bucket.members.items())
        for (place, (index, tensor)), (member, part) in zip(tensors, adam.members, strict=True):
            if not member.decoupled:
                g[part] += member.weight_decay * x[part]
            rows = tensor.shape[0] if len(tensor.shape) > 1 else 0
            columns = tensor.count // rows if rows else 0
            rank = int(np.ceil(self.rank_fraction * min(rows, columns)))
            if rows * columns <= rank * (rows + columns):
                rest.append((member, part))
                continue
            matrices.append((member, part))
            Bs.append((momentum[part] + g[part]).reshape(rows, columns))
            first = functools.partial(self._first, index, columns, rank, g.dtype)
            Qs.append(bucket.state.keep(f"Q.{place}", first, shared=True))

        means, operation = mean_of([*(B @ Q for B, Q in zip(Bs, Qs, strict=True)), *(g[part] for _, part in rest)],
                                   bucket, group, "P")
        yield operation
        for (member, part), mean in zip(rest, means[len(Bs):], strict=True):
            adam.m[part] = member.beta1 * adam.m[part] + (1 - member.beta1) * mean
            adam.v[part] = member.beta2 * adam.v[part] + (1 - member.beta2) * mean * mean
            p = preconditioner(member, adam.v[part], member.step + 1)
            x[part] -= member.lr * direction(member, adam.m[part], p, x[part])
        if Bs:
            Ps = [orthonormal(mean) for mean in means[:len(Bs)]]
            means, operation = mean_of([B.T @ P for B, P in zip(Bs, Ps, strict=True)], bucket, group, "R")
            yield operation
            for (member, part), B, P, Q, R in zip(matrices, Bs, Ps, Qs, means, strict=True):
                momentum[part] = (B - (1 - mu) * P @ R.T).ravel()
                Q[:] = R / np.maximum(np.linalg.norm(R, axis=0), np.finfo(R.dtype).tiny)
                update = self.scale * np.sqrt(max(B.shape)) * (P @ Q.T).ravel()
                x[part] -= member.lr * (update + (member.weight_decay * x[part] if member.decoupled else 0))
        adam.save(x, variance=True)

    def _first(self, index: int, columns: int, rank: int, dtype: np.dtype) -> np.ndarray:
        """Q of matrix `index` in the beginning, equal on all ranks."""
        return orthonormal(np.random.default_rng(index).standard_normal((columns, rank)).astype(dtype))
