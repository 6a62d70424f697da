"""ACCO: exact averages of gradients, wholly hidden, none a step late: half of the gradients are those of an estimate.

Steps come in pairs, of which each communicates the other's gradients. theta are the weights, theta~ an estimate of the
next ones; g is of theta, g~ of theta~ (the first g~ is of theta, too):

    step 2s         g~_i = gradient at theta~       meanwhile travels g_i
                    g = (1/n) sum_i g_i             theta  <- Adam(theta, (g + g~) / 2)         now at theta
    step 2s + 1     g_i = gradient at theta         meanwhile travels g~_i
                    g~ = (1/n) sum_i g~_i           theta~ <- Adam(theta, g~)                   now at theta~

Adam's momentum and variance are those of theta; the estimate leaves them as they are. So one update is made of two
steps' gradients, half of them exact and half of weights that are as near as half of the batch can tell: give it half of
the accumulation, or of the batch, that an update is to have.

Wire: 2 N (n-1)/n elements a step, while the next one computes.
Memory: 3 N elements (theta, g~, and what travels).
Source: Nabli et al., arXiv:2406.02613.  Differs: as many samples in both halves, and no optimizer in shards.
"""
import numpy as np

from bagua_hvd.algorithms.base import Algorithm, Safety
from bagua_hvd.algorithms.lamb import preconditioner
from bagua_hvd.algorithms.travelling import travelling
from bagua_hvd.job.process_sets import ProcessSet
from bagua_hvd.primitives import c_fp_s
from bagua_hvd.training.adam import FlatAdam
from bagua_hvd.training.buckets import Bucket
from bagua_hvd.training.model import Model
from bagua_hvd.training.source import Pending


class Acco(Algorithm):
    """Adam or AdamW with hidden averages; optimizers as for Lamb. After each second step weights are an estimate."""

    safety = Safety.E2
    dense_only = True
    counts_steps = True
    uses_weights = ("step",)
    uses_adam = True
    replaces_step = True

    def prepare(self, model: Model) -> None:
        model.adam()

    def gradients_travel(self, model: Model) -> bool:
        return False        # in the backward pass: what clips or unscales them comes after it

    def communicate(self, bucket: Bucket, group: ProcessSet) -> Pending:
        return c_fp_s(bucket, group)

    def step(self, model: Model) -> bool:
        state, s = model.state, model.step // 2         # not the buckets': a skipped step takes nothing of it back
        for place, bucket in enumerate(model.gradients):
            g = bucket.flat(bucket.gradients)
            on_its_way = travelling(state, f"travelling.{place}", g.size, g.dtype)
            arrived = on_its_way.take()
            name = f"{bucket.name}.travels"
            on_its_way.begin(g, c_fp_s(g, model.group, average=False, name=name), model.group, name)
            adam = FlatAdam(bucket, begin=True)
            theta, half = adam.weights(), None
            names = f"theta.{place}", f"half.{place}"
            if names[0] in state or state.loaded(names[0]):
                theta, half = (state.keep(name, theta.copy, shared=True) for name in names)
                for name in names:
                    state.forget(name)
            x = theta
            if arrived is not None and model.step % 2:
                for name, values in zip(names, (theta, arrived), strict=True):
                    state.keep(name, values.copy, shared=True)
                x, _, _ = adam_step(adam, theta, arrived, s + 1)
            elif arrived is not None:
                g = arrived if half is None else (arrived + half) / 2
                x, adam.m, adam.v = adam_step(adam, theta, g, max(1, s))
            adam.save(x, variance=True)
        return True


def adam_step(adam: FlatAdam, x: np.ndarray, g: np.ndarray, T: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(weights, momentum, variance) after the T-th update."""
    x, g, m, v = x.copy(), g.copy(), adam.m.copy(), adam.v.copy()
    for member, part in adam.members:
        if not member.decoupled:
            g[part] += member.weight_decay * x[part]
        m[part] = member.beta1 * m[part] + (1 - member.beta1) * g[part]
        v[part] = member.beta2 * v[part] + (1 - member.beta2) * g[part] * g[part]
        update = m[part] / (1 - member.beta1 ** T) / preconditioner(member, v[part], T)
        if member.decoupled:
            update += member.weight_decay * x[part]
        x[part] -= member.lr * update
    return x, m, v
