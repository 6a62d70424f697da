"""DiLoCo's outer optimizer: its state theta and m for each fragment of the model, and its step."""
from typing import TypeVar

import numpy as np

from bagua_hvd.training.buckets import Bucket, Weights

_F = TypeVar("_F", bound="Fragment")


def outer_step(theta: np.ndarray, m: np.ndarray, delta: np.ndarray, outer_lr: float, outer_momentum: float) -> None:
    """Nesterov momentum, in place: m = mu m + Delta; theta = theta - eta (Delta + mu m)."""
    m[:] = outer_momentum * m + delta
    theta -= outer_lr * (delta + outer_momentum * m)


class Fragment:
    """Consecutive members of a bucket of weights. p: index among the P fragments. x: the weights of these members."""

    def __init__(self, bucket: Bucket, p: int, x: Weights, place: slice) -> None:
        self.bucket, self.p, self.x, self._place = bucket, p, x, place

    @classmethod
    def of(cls: type[_F], bucket: Bucket, p: int, fragments: int) -> _F | None:
        """The members with their middle in the p-th share of the elements; None if there are none."""
        twice = 2 * max(1, bucket.count)
        chosen = [(index, member, part)
                  for (index, member), part in zip(bucket.members.items(), bucket.slices(), strict=True)
                  if min(fragments - 1, (part.start + part.stop) * fragments // twice) == p]
        if not chosen:
            return None
        x = Weights(f"{bucket.name}.{p}", {index: member for index, member, _ in chosen}, model=bucket.model)
        return cls(bucket, p, x, slice(chosen[0][2].start, chosen[-1][2].stop))

    def outer(self) -> tuple[np.ndarray, np.ndarray]:
        """(theta, m), as views to change in place."""
        theta = self.bucket.state["theta"]
        m = self.bucket.state.zeros_like("momentum", theta, shared=True)
        return theta[self._place], m[self._place]

    def stop_frozen(self) -> None:
        """Sets m of frozen members to 0, so that momentum does not move them."""
        _, m = self.outer()
        for index, part in zip(self.x.members, self.x.slices(), strict=True):
            if self.bucket.model.source.is_frozen(index):
                m[part] = 0
