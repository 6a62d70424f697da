"""Adam's state and hyperparameters, for algorithms that update the weights in the optimizer's place."""
from typing import NamedTuple

import numpy as np

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
        """Of one element, in learning rates, whatever its gradients: Kingma and Ba, arXiv:1412.6980, section 2.1."""
        return float(max(1.0, (1 - self.beta1) / (1 - self.beta2) ** 0.5))


class Adam:
    """An Adam optimizer of a front end.

    Attributes:
        warmup_steps: what the optimizer says of itself, or None.
    """

    warmup_steps: int | None = None

    def member(self, index: int) -> AdamMember:
        """The AdamMember of weight `index`; the state exists from the first step, or from begin() on."""
        raise NotImplementedError

    def begin(self, index: int) -> None:
        """Makes m and v of weight `index`, zeros, where the optimizer would do so in its first step."""

    def moments_written(self, index: int) -> None:
        """m or v of weight `index` has new values: bring them to where the optimizer has them, if that is elsewhere."""

    def stepped(self, index: int) -> None:
        """Weight `index` has been updated: counts it, as the optimizer's own step would."""
        raise NotImplementedError


class FlatAdam:
    """Adam's state of a bucket's weights as flat arrays, of which each weight has a slice.

    Args:
        bucket: of gradients. begin: makes the state where it is not there yet.
    Attributes:
        m, v: copies; float32, float64 for float64. save() brings them back.
        members: pairs of an AdamMember and its slice, in the order of the layout.
    """

    def __init__(self, bucket: Bucket, begin: bool = False) -> None:
        self._bucket = bucket
        self._adam: Adam = bucket.model.source.adam()
        for index in bucket.members if begin else ():
            self._adam.begin(index)
        members = [self._adam.member(index) for index in bucket.members]
        self.members = list(zip(members, bucket.slices(), strict=True))
        self.m: np.ndarray = bucket.flat([member.m for member in members])
        self.v: np.ndarray = bucket.flat([member.v for member in members])

    def weights(self) -> np.ndarray:
        """A copy of the weights as they are now, x."""
        return self._bucket.flat(self._bucket.weights)

    def save(self, x: np.ndarray, variance: bool = False) -> None:
        """Sets the weights to x, the optimizer's momenta to m, and its v if `variance`, and counts a step of each."""
        bucket = self._bucket
        if variance:
            bucket.set_flat([member.v for member, _ in self.members], self.v)
        bucket.set_flat([member.m for member, _ in self.members], self.m)
        bucket.set_flat(bucket.weights, x)
        for index in bucket.members:
            bucket.model.source.weight_written(index)
            self._adam.stepped(index)

    def save_variance(self) -> None:
        """Sets the optimizer's v alone, and counts no step."""
        self._bucket.set_flat([member.v for member, _ in self.members], self.v)
        for index in self._bucket.members:
            self._adam.moments_written(index)
