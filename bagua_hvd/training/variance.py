"""Adam's variance among relaxed steps: that of the exact gradients, as far as the rank's own gradients bear it out.

Adam's step is m / sqrt(v), and v holds the noise of the gradients that it is made of. Of one rank's gradients that is n
times the noise of their mean; and a gradient of which most is withheld for later is large when it comes. Steps made of
such gradients, relaxed ones, would be too small by up to sqrt(n). So there are two variances, both bias corrected, of
the gradient g that the optimizer is about to see in step t:

    v   <- v + (1 - beta2) / (1 - beta2^T) (g^2 - v)        in the T-th full step: g is the mean, equal on all ranks
    w_i <- w_i + (1 - beta2) / (1 - beta2^t) (g^2 - w_i)    in every step, this rank's own: what Adam alone would have

and the optimizer divides by the square root of

    min(max(v, w_i / n), w_i)

since the variance of a mean lies between these bounds, whatever the noise. They also hold where v says nothing: of an
element that had no gradient in any full step, or has another one now. So no step is more than sqrt(n) times as large
as Adam's own would be.

Where the optimizer is not Adam or AdamW nothing is changed; nor while all steps have been exact, nor with delay=1.

Memory: 2 N elements from the first relaxed step on. They are in checkpoints.
Source: a variance that is frozen between full steps is 0/1 Adam's, Lu et al., arXiv:2202.06009, after 1-bit Adam, Tang
et al., arXiv:2102.02888. Differs: the bounds; the optimizer makes its own step, and communication may be of any kind.
"""
import numpy as np

from bagua_hvd.core import vectors
from bagua_hvd.training.adam import members_of, places_of, views_of
from bagua_hvd.training.buckets import Bucket
from bagua_hvd.training.model import Model


def share(model: Model, exact: bool) -> None:
    """Gives the optimizer, which is about to step, its variance. exact: whether the gradients are."""
    if model.delay or model.step == 0 or model.adam_if_any() is None:
        return
    full_steps = model.state.keep("full steps", lambda: np.zeros(1, np.int64), shared=True)
    if full_steps[0] == 0 and exact:       # so have been all before: the optimizer's own is right
        return
    full_steps[0] = full_steps[0] or model.step
    for bucket in model.gradients:
        _share(bucket, int(full_steps[0]) + exact, exact, model.group.size())
    full_steps[0] += exact


def _share(bucket: Bucket, T: int, exact: bool, n: int) -> None:
    def fits(kept: np.ndarray) -> bool:
        return kept.size == bucket.count and kept.dtype == bucket.flat_dtype

    v = bucket.state.keep("variance", lambda: _corrected(bucket), True, fits)
    w = bucket.state.keep("own variance", lambda: _corrected(bucket), fits=fits)
    # What the optimizer passes over keeps its variance, as it keeps its momentum. Where gradients travel, zeros count.
    stepped = {index: part for index, part in zip(bucket.members, bucket.slices(), strict=True)
               if bucket.model.source.has_gradient(index)}
    members = members_of(bucket, stepped, begin=True)   # last: a member's views are good until it is asked for again
    numbers = []
    for member in members:
        corrections = 1 - member.beta2 ** T, 1 - member.beta2 ** (member.step + 1)
        numbers.append({"beta2": member.beta2, "exact_rate": (1 - member.beta2) / corrections[0] if exact else 0.0,
                        "own_rate": (1 - member.beta2) / corrections[1], "correction": corrections[1], "ranks": n})
    kept = v, w
    if len(stepped) < len(bucket.members):
        places = places_of(stepped)
        kept = v[places], w[places]
    vectors.adam_variance([member.v for member in members], views_of(bucket, bucket.gradients, stepped), numbers, *kept)
    if kept[0] is not v:
        v[places], w[places] = kept
    for index in stepped:
        bucket.model.source.adam().moments_written(index)


def _corrected(bucket: Bucket) -> np.ndarray:
    """The optimizer's own."""
    members = members_of(bucket, begin=True)        # a weight that is frozen has none
    v: np.ndarray = bucket.flat([member.v for member in members])
    for member, part in zip(members, bucket.slices(), strict=True):
        if member.step:
            v[part] /= 1 - member.beta2 ** member.step
    return v
