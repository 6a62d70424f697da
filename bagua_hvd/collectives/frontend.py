"""The adapter that a framework supplies so that the rules (rules.py) work on its tensors, and that of NumPy.

An adapter holds no policy. A rule that two adapters would share belongs in rules.py.
"""
from abc import ABC, abstractmethod
from typing import Any

import numpy as np

from bagua_hvd.core import native
from bagua_hvd.core.native import TensorView
from bagua_hvd.core.vectors import DTYPES


class Frontend(ABC):
    """One framework. A front end has one instance, without state.

    Attributes:
        reducible: native dtypes that allreduce and reducescatter take.
    """

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


class NumpyFrontend(Frontend):
    """NumPy arrays, C-contiguous, as the core sees them; communicated without a copy."""

    reducible = frozenset({
        native.UINT8, native.INT8, native.INT32, native.INT64, native.FLOAT16, native.FLOAT32, native.FLOAT64,
        native.BFLOAT16,
    })

    def view(self, tensor: Any, output: Any = None) -> Any:
        dtype = DTYPES.get(tensor.dtype.name)
        if dtype is None:
            raise ValueError(f"Tensor type {self.type_name(tensor)} is not supported.")
        dst = 0 if output is None else output.ctypes.data
        return TensorView(tensor.ctypes.data, dst, tensor.shape, dtype, (tensor, output))

    def allocate_like(self, tensor: Any, dim0: int | None = None) -> Any:
        shape = tensor.shape if dim0 is None else (dim0, *tensor.shape[1:])
        return np.empty(shape, tensor.dtype)

    def wrap_result(self, nbytes: int, shape: tuple[int, ...], dtype: Any, owner: Any) -> Any:
        numpy_dtype: np.dtype = np.dtype(native.dtype_name(dtype))
        if not nbytes:
            return np.empty(shape, numpy_dtype)
        return np.frombuffer(native.buffer(owner, nbytes), numpy_dtype).reshape(shape)

    def int32_tensor(self, values: Any, like: Any = None) -> Any:
        return np.array(values, np.int32)

    def splits(self, splits: Any) -> list:
        return [int(split) for split in splits]

    def shape(self, tensor: Any) -> Any:
        return tensor.shape

    def type_name(self, tensor: Any) -> str:
        return f"numpy.{tensor.dtype}"


numpy_frontend = NumpyFrontend()
