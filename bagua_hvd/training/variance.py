"""Adam's variance with relaxed steps: that of the exact gradients, within bounds from the rank's own gradients.

Adam's step is m / sqrt(v), and v contains the noise of its gradients. One rank's gradients have n times the noise of
their mean, and a gradient that was mostly withheld is large when it arrives. Relaxed steps made of such gradients would
be too small by up to sqrt(n). So there are two variances, both bias corrected, of the gradient g that the optimizer is
about to read in step t:

    v   <- v + (1 - beta2) / (1 - beta2^T) (g^2 - v)        in the T-th full step: g is the mean, equal on all ranks
    w_i <- w_i + (1 - beta2) / (1 - beta2^t) (g^2 - w_i)    in every step, this rank's own, as in plain Adam

and the optimizer divides by the square root of

    min(max(v, w_i / n), w_i)

since the variance of a mean lies between these bounds for any noise. They also hold where v has no information: for an
element without a gradient in any full step, or with a different one now. So no step is longer than sqrt(n) times Adam's
own.

Nothing is changed for optimizers other than Adam and AdamW, while all steps have been exact, or with delay=1.

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
    """Sets the variance of the optimizer, which is about to step. exact: whether the gradients are exact."""
    if model.delay or model.step == 0:
        return
    try:
        model.source.adam()
    except ValueError:      # another optimizer, which has no variance to share
        return
    full_steps: np.ndarray = model.state.keep("full steps", lambda: np.zeros(1, np.int64), shared=True)
    if full_steps[0] == 0 and exact:       # all steps were exact: the optimizer's own is right
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
    # Weights that the optimizer skips keep variance and momentum. If gradients are communicated, zeros count as such.
    stepped = {index: part for index, part in zip(bucket.members, bucket.slices(), strict=True)
               if bucket.model.source.has_gradient(index)}
    members = members_of(bucket, stepped, begin=True)   # last: a member's views are valid until the next request
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
    """The optimizer's own variance, bias corrected."""
    members = members_of(bucket, begin=True)        # a frozen weight has no state
    v: np.ndarray = bucket.flat([member.v for member in members])
    for member, part in zip(members, bucket.slices(), strict=True):
        if member.step:
            v[part] /= 1 - member.beta2 ** member.step
    return v
