"""Where gradients, weights and the optimizer come from: what a front end supplies, by index, and all that it supplies.

    Source              here: abstract
    TorchSource         torch/source.py: `p.grad` and the parameters
    TensorFlowSource    tensorflow/source.py: what a graph has brought over the bridge
    KerasTorchSource    _keras/torch_reduction.py: Keras on torch
"""
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, Protocol

from bagua_hvd.core.native import TensorView


class Pending(Protocol):
    """What is on its way: an Operation, an Exchange (algorithms/exchange.py), or whatever has this."""

    def wait(self) -> Any:
        """Blocks until it is there. Raises HorovodInternalError: ranks disagreed, or one was lost."""


class Source(ABC):
    """The gradients, weights and optimizer of one Reducer. Gradient i is that of weight i, 0, 1, ...

    Views are in place (src == dst): what the core writes there is what the framework sees, or will after finish() or
    weight_written().

    Attributes:
        factor: what prepare() and communicate() multiply gradients by before they travel; 0: zeros travel.
    """

    factor: float = 1.0

    @abstractmethod
    def prepare(self, index: int) -> TensorView:
        """Prepares gradient `index` for communication, which reads and writes the TensorView that this returns.

        Without a gradient it is zeros. Once for each communication of the gradient; finish() or discard() follows.
        """

    @abstractmethod
    def gradient(self, index: int) -> TensorView:
        """The TensorView of gradient `index` as it is now, to be read only; zeros when there is none."""

    def hand_over(self, indices: Iterable[int],
                  memory: list[TensorView] | None) -> tuple[list[TensorView], list[TensorView]] | None:
        """Gives some gradients other memory in place of their own, which nobody else uses from then on.

        Args:
            memory: of each, what an earlier call has taken away; None: new memory, of no value.
        Returns:
            In-place TensorViews of what was theirs, and of what is theirs now. None: it cannot; nothing has changed.
        """
        return None

    def cleared(self) -> None:  # noqa: B027  (optional)
        """What is in the gradients' memory from now on is this rank's alone, no longer the last result."""

    @abstractmethod
    def weight(self, index: int) -> TensorView:
        """The TensorView of weight `index`, where it lies now."""

    def weight_written(self, index: int) -> None:  # noqa: B027  (optional)
        """weight(index) has new values: bring them to where the model has them, if that is elsewhere."""

    def is_frozen(self, index: int) -> bool:
        """Whether weight `index` is not to be trained now, and the optimizer would pass it over."""
        return False

    def has_gradient(self, index: int) -> bool:
        """Whether gradient `index` is there now. The optimizer's own step passes weights over that have none."""
        return True

    def fingerprint(self) -> int:
        """A number from 0 to 2**31 - 2 that differs, most likely, where gradients are for other variables."""
        return 0

    def sparse_dim(self, index: int) -> int:
        """Of how many leading dimensions gradient `index` holds some entries only; 0: dense, as far as is known."""
        return 0

    def travels_alone(self, index: int, sparse_dim: int) -> bool:
        """Whether a gradient that some rank has sparse goes by communicate() on all of them, and in no bucket."""
        return False

    def communicate(self, index: int, name: str) -> Pending:
        """Begins the communication of a gradient for which travels_alone() was True.

        name: what its operations are to be called, unique in this process.
        """
        raise NotImplementedError

    def finish(self) -> None:  # noqa: B027
        """All views of this step hold results: undo compression and copies."""

    def holds_reduced(self) -> bool:
        """Whether gradients are still those that finish() left, with what has been added to them since."""
        return False

    def discard(self) -> None:  # noqa: B027
        """Forget this step's views; after finish(), or because something failed."""

    def loss_scale(self) -> float | None:
        """What multiplies the loss now, and so the gradients until the step; None: nothing, as far as is known."""
        return None

    def adam(self) -> Any:
        """The optimizer as an Adam (training/adam.py).

        Raises:
            ValueError: why it is none that can be served.
        """
        raise ValueError("this front end has no Adam to share")


class NoSource(Source):
    """Of a step that is not there: before the first one, and where hooks see nothing but buckets."""

    def prepare(self, index: int) -> TensorView:
        raise RuntimeError("there is no step, so there are no gradients outside of buckets")

    gradient = prepare

    def weight(self, index: int) -> TensorView:
        raise RuntimeError("there is no step, so there are no weights")
