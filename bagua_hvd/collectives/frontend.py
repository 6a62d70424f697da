"""The adapter that a framework supplies so that the rules (rules.py) work on its tensors: about ten methods.

An adapter holds no policy. A rule that two adapters would share belongs in rules.py.
"""
from abc import ABC, abstractmethod
from typing import Any


class Frontend(ABC):
    """One framework. A front end has one instance, without state.

    Attributes:
        name: of the framework.
        reducible: native dtypes that allreduce and reducescatter take.
    """

    name: str
    reducible: frozenset

    @abstractmethod
    def view(self, tensor: Any, output: Any = None) -> Any:
        """The TensorView from `tensor` to `output`; None: the core allocates the result; `tensor` itself: in place.

        Raises:
            ValueError: dtype or device not supported ("Tensor type ... is not supported."), or not contiguous.
        """

    @abstractmethod
    def allocate_like(self, tensor: Any, dim0: int | None = None) -> Any:
        """An uninitialized, contiguous tensor like `tensor`, with first dimension `dim0` when given."""

    @abstractmethod
    def wrap_result(self, nbytes: int, shape: tuple[int, ...], dtype: Any, owner: Any) -> Any:
        """A tensor over the `nbytes` of `owner` (native.buffer), without a copy; keeps it alive. 0: owner is None."""

    def typed(self, tensor: Any, like: Any) -> Any:
        """Casts a result in bytes to the type of tensor `like`, which view() may have passed as bytes."""
        return tensor

    @abstractmethod
    def int32_tensor(self, values: Any, like: Any = None) -> Any:
        """A 1-D int32 tensor of the Python ints, on the device of tensor `like` when that is a tensor."""

    @abstractmethod
    def splits(self, splits: Any) -> Any:
        """The alltoall splits (a list or a 1-D int32 tensor) as a list of ints. ValueError: not int32, not 1-D."""

    @abstractmethod
    def shape(self, tensor: Any) -> Any:
        """The tensor's shape as a tuple of ints."""

    @abstractmethod
    def type_name(self, tensor: Any) -> Any:
        """The name of the tensor's type in error messages."""
