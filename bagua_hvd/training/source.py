"""The interface by which a front end supplies gradients, weights and the optimizer, by index.

    Source              here: what a front end supplies, and what stands for it outside of steps
    TorchSource         torch/source.py: `p.grad` and the parameters
    Step                tensorflow/step.py: arrays that a graph has passed over the bridge
    KerasTorchSource    _keras/torch_reduction.py: Keras on torch
"""
from collections.abc import Iterable
from typing import Any, Protocol

from bagua_hvd.core.native import TensorView
from bagua_hvd.training.adam import Adam


class Pending(Protocol):
    """Anything in flight: an Operation, an Exchange (algorithms/exchange.py), or any object with wait()."""

    def wait(self) -> Any:
        """Blocks until it is complete. Raises HorovodInternalError: ranks disagreed, or one was lost."""


class Source:
    """The gradients, weights and optimizer of one Reducer. Gradient i is that of weight i, 0, 1, ...

    Views are in place (src == dst): the framework sees what the core writes there, at once or after finish() or
    weight_written().

    Attributes:
        factor: prepare() and communicate() multiply gradients by it; 0: zeros are sent.
    """

    factor: float = 1.0

    def prepare(self, index: int) -> TensorView:
        """Prepares gradient `index` for communication, which reads and writes the TensorView that this returns.

        A missing gradient is zeros. Called once for each communication of the gradient; finish() or discard() follows.
        """
        raise RuntimeError("there is no step, so there are no gradients outside of buckets")

    def gradient(self, index: int) -> TensorView:
        """The TensorView of gradient `index` as it is now, read-only; zeros if there is none."""
        return self.prepare(index)

    def hand_over(self, indices: Iterable[int],
                  memory: list[TensorView] | None) -> tuple[list[TensorView], list[TensorView]] | None:
        """Replaces the memory of some gradients; nothing else uses their old memory from then on.

        Args:
            memory: for each, the memory that an earlier call has taken away; None: new, uninitialized memory.
        Returns:
            In-place TensorViews of the old and of the new memory. None: not supported; nothing has changed.
        """
        return None

    def cleared(self) -> None:
        """Called when gradients no longer hold the last result, but only this rank's values from now on."""

    def weight(self, index: int) -> TensorView:
        """The TensorView of weight `index` in its current memory."""
        raise RuntimeError("there is no step, so there are no weights")

    def weight_written(self, index: int) -> None:
        """Called after weight(index) was written: copies it to the model if that stores it elsewhere."""

    def is_frozen(self, index: int) -> bool:
        """Whether weight `index` is not trained now, so that the optimizer would skip it."""
        return False

    def has_gradient(self, index: int) -> bool:
        """Whether gradient `index` exists now. The optimizer's own step skips weights without one."""
        return True

    def fingerprint(self) -> int:
        """A number from 0 to 2**31 - 2 that differs, most likely, where gradients are for other variables."""
        return 0

    def sparse_dim(self, index: int) -> int:
        """The number of sparse leading dimensions of gradient `index`; 0: dense, as far as is known."""
        return 0

    def bypasses_buckets(self, index: int, sparse_dim: int) -> bool:
        """Whether a gradient that is sparse on some rank is sent by communicate() on all ranks, and in no bucket."""
        return False

    def communicate(self, index: int, name: str) -> Pending:
        """Begins the communication of a gradient for which bypasses_buckets() was True.

        name: the name of its operations, unique in this process.
        """
        raise NotImplementedError

    def finish(self) -> None:
        """Called when all views hold results: undoes compression and copies. prepare() then begins anew."""

    def holds_reduced(self) -> bool:
        """Whether gradients are still those that finish() left, perhaps with later additions."""
        return False

    def discard(self) -> None:
        """Forgets the views, after a failure."""

    def loss_scale(self) -> float | None:
        """The current factor of the loss, and so of the gradients until the step; None: none, as far as is known."""
        return None

    def adam(self) -> Adam:
        """The optimizer as an Adam (training/adam.py).

        Raises:
            ValueError: it is not a supported one; the message says why.
        """
        raise ValueError("this front end has no Adam to share")
