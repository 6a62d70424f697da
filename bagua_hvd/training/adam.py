"""Adam's state and hyperparameters, for algorithms that update the weights instead of the optimizer."""
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from bagua_hvd.core import vectors
from bagua_hvd.core.native import TensorView
from bagua_hvd.training.buckets import Bucket


class AdamMember(NamedTuple):
    """Adam's state and hyperparameters of one weight. m, v: in-place TensorViews in the weight's dtype.

    step: how often it has been updated. decoupled: weight decay as in AdamW, else added to the gradient.
    eps_corrected: eps is added before the bias correction of v, as Keras does, not after it.
    """

    m: TensorView
    v: TensorView
    step: int
    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool
    eps_corrected: bool = False

    @property
    def longest_step(self) -> float:
        """Of one element, in learning rates, for any gradients: Kingma and Ba, arXiv:1412.6980, section 2.1."""
        return float(max(1.0, (1 - self.beta1) / (1 - self.beta2) ** 0.5))

    def denominator(self, updates: int) -> tuple[float, float]:
        """(c, e) of Adam's denominator p = sqrt(v) / c + e after `updates` updates of v.

        Keras uses (sqrt(v) + eps) / c.
        """
        correction = math.sqrt(1 - self.beta2 ** updates)
        return correction, self.eps / correction if self.eps_corrected else self.eps


class Adam:
    """An Adam optimizer of a front end.

    Attributes:
        warmup_steps: the optimizer's attribute of this name, or None.
    """

    warmup_steps: int | None = None

    def member(self, index: int) -> AdamMember:
        """The AdamMember of weight `index`; the state exists from the first step, or from begin() on."""
        raise NotImplementedError

    def begin(self, index: int) -> None:
        """Creates m and v of weight `index`, as zeros, where the optimizer would do so in its first step."""

    def moments_written(self, index: int) -> None:
        """Called after m or v of weight `index` was written: copies it to the optimizer if that stores it elsewhere."""

    def stepped(self, index: int) -> None:
        """Counts an update of weight `index`, as the optimizer's own step would."""
        raise NotImplementedError


def members_of(bucket: Bucket, indices: Iterable[int] | None = None, begin: bool = False) -> list[AdamMember]:
    """The AdamMembers of a bucket's weights, in layout order. begin: creates state that does not exist yet.

    indices: which weights; None: all.
    """
    adam: Adam = bucket.model.source.adam()
    indices = bucket.members if indices is None else indices
    for index in indices if begin else ():
        adam.begin(index)
    return [adam.member(index) for index in indices]


def trained_of(bucket: Bucket) -> dict[int, slice]:
    """For each of a bucket's weights that is not frozen, its slice of a flat array."""
    parts = zip(bucket.members, bucket.slices(), strict=True)
    return {index: part for index, part in parts if not bucket.model.source.is_frozen(index)}


def _numbers(bucket: Bucket, members: dict[int, AdamMember], frozen_for: int, bounded: bool) -> list[dict[str, float]]:
    """The fields of a struct bhvd_adam for each, for the next step; v is frozen since `frozen_for` updates."""
    missed, numbers = bucket.model.missed, []
    for index, member in members.items():
        corrected = 1 - member.beta1 ** (member.step + 1)
        correction, eps = member.denominator(member.step - (frozen_for - missed[index]))
        numbers.append({
            "beta1": member.beta1, "correction": correction, "eps": eps,
            "longest": corrected * member.longest_step if bounded else math.inf,
            "weight_decay": 0.0 if member.decoupled else member.weight_decay,
            "rate": member.lr / corrected, "decay": member.lr * member.weight_decay if member.decoupled else 0.0,
        })
    return numbers


def momentum(bucket: Bucket, gradients: Sequence[TensorView], frozen_for: int, in_steps: bool,
             bounded: bool) -> np.ndarray:
    """beta1 m + (1 - beta1) g of a bucket's weights, 0 where v is 0; flat, valid until the next call. m is not changed.

    Args:
        gradients: g; weight decay is added where it is not decoupled.
        frozen_for: the number of updates of the weights since v was frozen.
        in_steps: whether to divide it by p = sqrt(v) / sqrt(1 - beta2^T) + eps.
        bounded: whether to clip it to Adam's longest step.
    """
    trained = trained_of(bucket)
    members = dict(zip(trained, members_of(bucket, trained), strict=True))
    numbers = _numbers(bucket, members, frozen_for, bounded)
    decays = any(each["weight_decay"] for each in numbers)
    sent = bucket.workspace("momentum", bucket.count, bucket.flat_dtype)
    all_are = len(trained) == len(bucket.members)
    dense = sent if all_are else np.empty(sum(part.stop - part.start for part in trained.values()), sent.dtype)
    vectors.adam_momentum([member.m for member in members.values()], [member.v for member in members.values()],
                          views_of(bucket, gradients, trained),
                          views_of(bucket, bucket.weights, trained) if decays else None, numbers, in_steps, dense)
    if not all_are:
        sent[:] = 0
        sent[places_of(trained)] = dense
    return sent


def step(bucket: Bucket, sent: np.ndarray, frozen_for: int, in_steps: bool, bounded: bool) -> None:
    """Makes Adam's step with the averaged momentum(): sets weights and m, and counts the step; arguments as there.

    Frozen weights, and their Adam state, are not changed.
    """
    trained, source = trained_of(bucket), bucket.model.source
    members = dict(zip(trained, members_of(bucket, trained), strict=True))
    vectors.adam_step([member.m for member in members.values()], [member.v for member in members.values()],
                      views_of(bucket, bucket.weights, trained), _numbers(bucket, members, frozen_for, bounded),
                      in_steps, sent if len(trained) == len(bucket.members) else sent[places_of(trained)])
    bucket.model.missed.update(bucket.members.keys() - trained.keys())
    for index in trained:
        source.weight_written(index)
        source.adam().stepped(index)


def views_of(bucket: Bucket, views: Sequence[TensorView], indices: Iterable[int]) -> list[TensorView]:
    """The views of some of a bucket's weights."""
    of_all = dict(zip(bucket.members, views, strict=True))
    return [of_all[index] for index in indices]


def places_of(parts: dict[int, slice]) -> np.ndarray:
    """The positions of some parts in a flat array."""
    places: np.ndarray = np.concatenate([np.arange(part.start, part.stop) for part in parts.values()] or [np.arange(0)])
    return places
